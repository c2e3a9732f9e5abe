# The CUDA language, the architectures to build for, and CUTLASS's headers.

# Tensor-core and FP4 instructions exist only in the architecture-specific targets: without the letter the compiler
# refuses them, or the kernels would silently be left out.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures, e.g. 90a or 80;90a;100a;120a" FORCE)
endif()
set(MEGAMOE_HOPPER OFF)
set(architectures "")
foreach(architecture ${CMAKE_CUDA_ARCHITECTURES})
  string(REGEX REPLACE "-(real|virtual)$" "" plain ${architecture})
  if(plain MATCHES "^(90|100|103|120|121)$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=${architecture} has no tensor-core kernels: use ${plain}a "
                        "(-DCMAKE_CUDA_ARCHITECTURES=${plain}a)")
  elseif(NOT plain MATCHES "^(8[0-9]|90a|1[0-9][0-9][af])$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES=${architecture}: name the architectures, such as 90a for Hopper or "
                        "80;90a;100a;120a for all (-DCMAKE_CUDA_ARCHITECTURES=90a)")
  endif()
  if(plain STREQUAL "90a")
    set(MEGAMOE_HOPPER ON)
  endif()
  list(APPEND architectures ${plain}-real)
endforeach()
set(CMAKE_CUDA_ARCHITECTURES ${architectures})
if(NOT MEGAMOE_HOPPER)
  message(STATUS "MegaMoE: 90a is not among the CUDA architectures, the Hopper kernels are left out")
endif()

# For GPU code that is compiled, but not run: in a quarter of the time.
set(MEGAMOE_GPU_SPEED)
if(MEGAMOE_QUICK_GPU)
  set(MEGAMOE_GPU_SPEED $<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
endif()

set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc knows C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit 13 REQUIRED)

# megamoe_cutlass: CUTLASS's headers, from -DCUTLASS_DIR (a checkout or its include folder) or the Python package.
if(MEGAMOE_HOPPER)
  set(CUTLASS_DIR "" CACHE PATH "CUTLASS, at least 4.2: the folder that holds include/cute")
  set(hints ${CUTLASS_DIR} ${CUTLASS_DIR}/include)
  if(NOT CUTLASS_DIR)
    find_package(Python3 COMPONENTS Interpreter)
    if(Python3_Interpreter_FOUND)
      execute_process(
        COMMAND ${Python3_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('cutlass_library'); \
print(s.submodule_search_locations[0] if s else '', end='')"
        OUTPUT_VARIABLE package ERROR_QUIET)
      if(package)
        set(hints ${package}/source/include)
      endif()
    endif()
  endif()
  find_path(MEGAMOE_CUTLASS_INCLUDE cute/arch/mma_sm90_gmma.hpp PATHS ${hints} NO_DEFAULT_PATH NO_CACHE)
  if(NOT MEGAMOE_CUTLASS_INCLUDE)
    message(FATAL_ERROR "The Hopper kernels need CUTLASS's headers, at least 4.2: pass -DCUTLASS_DIR=<folder with "
                        "include/cute>; tools/fetch_cutlass.sh fetches them and prints their folder")
  endif()
  file(STRINGS ${MEGAMOE_CUTLASS_INCLUDE}/cutlass/version.h version REGEX "#define CUTLASS_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9;]" "" version "${version}")
  list(JOIN version "." version)
  if(version VERSION_LESS 4.2)
    message(FATAL_ERROR "CUTLASS must be at least 4.2, ${MEGAMOE_CUTLASS_INCLUDE} holds ${version}")
  endif()
  add_library(megamoe_cutlass INTERFACE)
  target_include_directories(megamoe_cutlass SYSTEM INTERFACE ${MEGAMOE_CUTLASS_INCLUDE})
endif()
