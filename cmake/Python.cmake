# jaxgraph_ffi: core, devices, the process's executors and the XLA FFI handlers in one shared library
# without Python in it. jaxgraph._native: the nanobind module that hands them to JAX.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module
  OPTIONAL_COMPONENTS Development.SABIModule)

# A library built with older FFI headers loads on newer runtimes, never the other way, so the build
# environment holds the oldest supported jaxlib (pyproject.toml). jax.ffi.include_dir() names this
# folder; asking jaxlib itself spares the build environment the rest of jax.
if(NOT JAXGRAPH_XLA_INCLUDE_DIR)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u, os; print(os.path.dirname(u.find_spec('jaxlib').origin) + '/include')"
    OUTPUT_VARIABLE JAXGRAPH_XLA_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT EXISTS ${JAXGRAPH_XLA_INCLUDE_DIR}/xla/ffi/api/ffi.h)
  message(FATAL_ERROR "No XLA FFI headers in '${JAXGRAPH_XLA_INCLUDE_DIR}': install jaxlib, or set "
    "JAXGRAPH_XLA_INCLUDE_DIR")
endif()

add_library(jaxgraph_ffi SHARED ffi/runtime/runtime.cpp ffi/bind/execute_handler.cpp)
target_include_directories(jaxgraph_ffi SYSTEM PRIVATE ${JAXGRAPH_XLA_INCLUDE_DIR})
target_link_libraries(jaxgraph_ffi PRIVATE jaxgraph_core $<TARGET_NAME_IF_EXISTS:jaxgraph_cuda>)
# Neither our own static libraries nor the CUDA runtime may answer for another library's symbols.
target_link_options(jaxgraph_ffi PRIVATE LINKER:--exclude-libs,ALL LINKER:--no-undefined)

execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)
nanobind_add_module(_native STABLE_ABI NB_STATIC ffi/bind/module.cpp ffi/bind/plain_data.cpp
  ffi/bind/program_spec.cpp ffi/bind/testing.cpp)
target_link_libraries(_native PRIVATE jaxgraph_ffi jaxgraph_core)
target_compile_definitions(_native PRIVATE JAXGRAPH_VERSION="${PROJECT_VERSION}")
set_target_properties(_native PROPERTIES BUILD_RPATH_USE_ORIGIN ON INSTALL_RPATH $ORIGIN)

install(TARGETS jaxgraph_ffi _native LIBRARY DESTINATION jaxgraph)
