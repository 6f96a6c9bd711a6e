// The library hides its symbols; what is marked so is what the Python module links to.
#pragma once

#define JAXGRAPH_EXPORT __attribute__((visibility("default")))
