# What every target of ours is compiled with.
add_library(jaxgraph_options INTERFACE)
target_include_directories(jaxgraph_options INTERFACE ${PROJECT_SOURCE_DIR})

# Warnings are errors where we test; a newer compiler's new warning must not stop somebody's install.
option(JAXGRAPH_WERROR "Treat warnings of our own code as errors" OFF)
target_compile_options(jaxgraph_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler=-Wall,-Wextra>")
if(JAXGRAPH_WERROR)
  target_compile_options(jaxgraph_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()

if(JAXGRAPH_SANITIZE)
  set(sanitize -fsanitize=${JAXGRAPH_SANITIZE} -fno-omit-frame-pointer -g)
  target_compile_options(jaxgraph_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitize}>)
  target_link_options(jaxgraph_options INTERFACE -fsanitize=${JAXGRAPH_SANITIZE})
endif()
