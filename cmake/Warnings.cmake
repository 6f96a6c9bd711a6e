# What every target of ours is compiled with.
add_library(jaxgraph_options INTERFACE)
target_include_directories(jaxgraph_options INTERFACE ${PROJECT_SOURCE_DIR})

set(host_warnings -Wall -Wextra -Werror)
target_compile_options(jaxgraph_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:${host_warnings}>
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler=-Wall,-Wextra>")

if(JAXGRAPH_SANITIZE)
  set(sanitize -fsanitize=${JAXGRAPH_SANITIZE} -fno-omit-frame-pointer -g)
  target_compile_options(jaxgraph_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize}>)
  target_link_options(jaxgraph_options INTERFACE -fsanitize=${JAXGRAPH_SANITIZE})
endif()
