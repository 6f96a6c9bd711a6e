# Decides whether the CUDA device is built (JAXGRAPH_WITH_CUDA), and for which architectures.
#
# CMAKE_CUDA_ARCHITECTURES decides if it is set (-D, or the environment variable CUDAARCHS). Else the
# GPU of this machine is asked, so that building where it will run is quick. Where there is none (CI,
# a container), code for Hopper, and for all others PTX that the driver compiles when it loads.
# Releases say -DCMAKE_CUDA_ARCHITECTURES="75;80;86;89;90a;100;120".
set(JAXGRAPH_WITH_CUDA OFF)
if(JAXGRAPH_CUDA STREQUAL "OFF")
  return()
endif()

# Must be known before the language is enabled: CMake's own default can be an architecture that the
# compiler has dropped.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(architectures "")
  find_program(JAXGRAPH_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(JAXGRAPH_NVIDIA_SMI)
  if(JAXGRAPH_NVIDIA_SMI)
    execute_process(COMMAND ${JAXGRAPH_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE capabilities ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" architecture ${capability})
      if(architecture EQUAL 90)
        set(architecture 90a)  # Hopper's own instructions
      endif()
      list(APPEND architectures ${architecture})
    endforeach()
    list(REMOVE_DUPLICATES architectures)
  endif()
  if(NOT architectures)
    set(architectures 75-virtual 90a-real)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "CUDA architectures")
endif()

include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  find_package(CUDAToolkit REQUIRED)
  set(JAXGRAPH_WITH_CUDA ON)
  message(STATUS "CUDA ${CUDAToolkit_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
elseif(JAXGRAPH_CUDA STREQUAL "AUTO")
  message(STATUS "No CUDA compiler found: building for the host alone")
else()
  message(FATAL_ERROR "JAXGRAPH_CUDA=ON, but no CUDA compiler was found (set CUDACXX to nvcc)")
endif()
