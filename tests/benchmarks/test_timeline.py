"""What becomes of a profile: kernels of one step, each from the end of the one before it."""

import json
from pathlib import Path

import jax
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# What a GPU does in a step: in each, the second kernel is there before the first has ended, and the
# third comes late.
NAMES = (
    "void jaxgraph::(anonymous namespace)::StreamTilesKernel<jaxgraph::BF16, 8>(jaxgraph::Params)",
    "jaxgraph::(anonymous namespace)::AttentionDecodeKernel<float>(int)",
    "jaxgraph_group_0123456789abcdef",
)
STEP = [(0, 4000), (1000, 5500), (8000, 2500)]  # begin, duration; ns
EVENTS = [(20_000 * i + begin, ns) for i in range(4) for begin, ns in STEP]


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import timeline

    return timeline


def profile(events):
    def xplane(name, line, events):
        names = "".join(
            f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{n}" }} }}'
            for i, n in enumerate(NAMES)
        )
        spans = "".join(
            f"events {{ metadata_id: {i % 3 + 1} offset_ps: {1000 * begin} "
            f"duration_ps: {1000 * ns} }}"
            for i, (begin, ns) in events
        )
        return f'planes {{ name: "{name}" {names} lines {{ name: "{line}" {spans} }} }}'

    text = xplane("/device:GPU:0", "Stream #14(Compute)", list(enumerate(events)))
    text += xplane("/host:CPU", "Stream #1", [(0, (5, 7))])
    return jax.profiler.ProfileData.from_text_proto(text)


def test_a_step_goes_from_the_end_of_the_one_before(timeline):
    kernels = timeline.kernels_of(profile(EVENTS))
    assert len(kernels) == 12
    step = timeline.one_step(kernels, 4)
    assert [k.name for k in step] == [
        "StreamTilesKernel", "AttentionDecodeKernel", "jaxgraph_group_0123456789abcdef",
    ]  # fmt: skip
    # The step before it ended at 10.5 µs; the second kernel's wait for the first is not its work.
    times = [(k.start_us, k.end_us) for k in step]
    assert times == [(9.5, 13.5), (13.5, 16.0), (17.5, 20.0)]
    assert timeline.summary(step) == {
        "products": (1, 4.0),
        "attention": (1, 2.5),
        "norms, rows and all else": (1, 2.5),
        "between kernels": (0, 11.0),
    }


def test_what_comes_before_and_after_the_steps_is_left_out(timeline):
    kernels = timeline.kernels_of(profile(EVENTS))
    more = [timeline.Kernel("copy", -9.0, -8.0), *kernels, timeline.Kernel("copy", 90.0, 91.0)]
    assert timeline.one_step(more, 4) == timeline.one_step(kernels, 4)


def test_kernels_of_layers_are_neither_attention_nor_products(timeline):
    for name in ("LayerAttentionKernel", "LayerMlpKernel", "LayerEndKernel"):
        assert timeline.Kernel(name, 0, 1).kind == "layers"


def test_kernels_of_xla_have_a_kind_of_their_own(timeline):
    for name in ("input_reduce_fusion_54", "loop_add_fusion", "gemm_fusion_dot_3"):
        assert timeline.Kernel(name, 0, 1).kind == "kernels of XLA"


def test_steps_that_are_not_equal_are_refused(timeline):
    kernels = timeline.kernels_of(profile(EVENTS))
    renamed = [k._replace(name=f"kernel {i}") for i, k in enumerate(kernels)]
    with pytest.raises(ValueError, match="12 kernels are not those of 4 equal steps"):
        timeline.one_step(renamed, 4)
    with pytest.raises(ValueError, match="0 kernels"):
        timeline.one_step([], 4)


def test_a_picture_has_all_kernels(timeline):
    pytest.importorskip("matplotlib")
    import pictures

    step = timeline.one_step(timeline.kernels_of(profile(EVENTS)), 4)
    drawn = [{**k._asdict(), "kind": k.kind} for k in step]
    engine = {"end_us": 20.0, "kinds": timeline.summary(step), "kernels": drawn}
    figures = {"shape": "1b", "engines": {"XLA": engine, "jaxgraph": engine}}
    xla, ours, enlarged = pictures.timeline_figure(figures).axes
    for axes in (xla, ours, enlarged):
        widths = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
        assert widths == [(9.5, 4.0), (13.5, 2.5), (17.5, 2.5)]
    assert "3 kernels, 20 µs" in ours.get_title(loc="left")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there are kernels to show")
def test_without_a_gpu_it_says_so(timeline, capsys, tmp_path):
    assert timeline.main(["--json", str(tmp_path / "t.json")]) == 0
    assert "no GPU" in capsys.readouterr().out and not (tmp_path / "t.json").exists()


@pytest.mark.gpu
def test_a_real_step(timeline, tmp_path):
    assert timeline.main(["--shape", "15m", "--json", str(tmp_path / "t.json")]) == 0
    engines = json.loads((tmp_path / "t.json").read_text())["engines"]
    ours = engines["jaxgraph"]
    assert ours["kinds"]["attention"][0] in (6, 12), "of each layer, perhaps with a second pass"
    assert len(ours["kernels"]) < len(engines["XLA"]["kernels"])
    ends = [k["end_us"] for k in ours["kernels"]]
    assert ends == sorted(ends) and 0 < ends[-1] < 10_000
