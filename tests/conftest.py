"""What all tests share: where the examples are, the real model, and which tests can run here."""

import os
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "examples"))


@pytest.fixture(scope="session", autouse=True)
def exact_products():
    """XLA multiplies f32 in TF32 on a GPU, which no reference for our kernels' f32 can be."""
    import jax

    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import jax

    if jax.default_backend() != "gpu":
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def two_devices(request):
    """The environment of a process that sees two devices: of the host, or two GPUs."""
    import jax

    if request.param == "cuda" and jax.device_count("gpu") < 2:
        pytest.skip("needs two CUDA devices")
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu" if request.param == "cpu" else "cuda,cpu",
        "JAX_NUM_CPU_DEVICES": "2",  # fixed when JAX starts
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has device memory, too
    }


@pytest.fixture
def without_folder():
    """Takes the repository's folder, which may have any name, out of paths in a text."""
    return lambda text: text.replace(str(REPOSITORY), "")


@pytest.fixture(scope="session")
def smollm():
    """SmolLM2-135M-Instruct, opened; fetched on first use."""
    from gguf_model import ModelFile
    from model_cache import ModelUnavailable, default_model

    try:
        path = default_model()
    except ModelUnavailable as error:
        pytest.skip(str(error))
    return ModelFile(path)
