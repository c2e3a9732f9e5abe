# For find_package(megamoe): what the static library is linked with, then the library.
include(CMakeFindDependencyMacro)
find_dependency(OpenMP COMPONENTS CXX)
find_dependency(fmt)
include(${CMAKE_CURRENT_LIST_DIR}/megamoe-targets.cmake)
