# What every target of the project is built with, and short forms for sources and tests.

include(CheckCXXSourceCompiles)

function(megamoe_defaults target)
  # The numbers are defined by separate FP32 roundings: no contraction into fused multiply-adds.
  set(cxx -ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
  set(cuda --fmad=false --expt-relaxed-constexpr -Xcompiler=-ffp-contract=off,-Wall,-Wextra)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 sees accesses out of bounds where a std::string is moved; the sanitizers watch for real ones.
    list(APPEND cxx -Wno-array-bounds -Wno-stringop-overread -Wno-stringop-overflow)
  endif()
  if(MEGAMOE_WERROR)
    list(APPEND cxx -Werror)
    list(APPEND cuda -Werror=all-warnings)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${cxx}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda}>")
  get_target_property(type ${target} TYPE)
  if(MEGAMOE_UNITY_PROGRAMS AND type STREQUAL EXECUTABLE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON)
  endif()
  if(MEGAMOE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MEGAMOE_SANITIZE} -fno-sanitize-recover=all)
    if(MEGAMOE_NO_SANITIZE)
      target_compile_options(${target} PRIVATE -fno-sanitize=${MEGAMOE_NO_SANITIZE})
    endif()
    target_link_options(${target} PUBLIC -fsanitize=${MEGAMOE_SANITIZE})
  endif()
endfunction()

# Adds sources of the current folder to the library. A unity build compiles a folder's sources, and those of a program,
# as one: the fastest way, of which CI builds once without.
function(megamoe_sources)
  target_sources(megamoe PRIVATE ${ARGN})
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  set_source_files_properties(${ARGN} TARGET_DIRECTORY megamoe PROPERTIES UNITY_GROUP ${folder})
endfunction()

# Whether there are sources for vector instructions of x86, by the test that the code makes, and their flags.
check_cxx_source_compiles("#ifndef __x86_64__\n#error\n#endif\nint main() {}" MEGAMOE_X86)
set(MEGAMOE_AVX2 -mavx2 -mfma -mf16c)
# GCC 12 warns of its own _mm512_undefined_ps.
set(MEGAMOE_AVX512 ${MEGAMOE_AVX2} -mavx512f -mavx512bw -mavx512vl
                   $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

# megamoe_source_with(file flag...): a source of the current folder for which more instructions are allowed than every
# CPU has. It is used after a look at the processor, and shares no function with other sources.
function(megamoe_source_with file)
  megamoe_sources(${file})
  set_source_files_properties(${file} TARGET_DIRECTORY megamoe PROPERTIES COMPILE_OPTIONS "${ARGN}"
                                                                          SKIP_PRECOMPILE_HEADERS ON)
endfunction()

# For what works on files and text, and for tests whose time the library takes: the compiler then takes half as long.
set(MEGAMOE_LIGHT "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-Og>")

# A target whose precompiled headers test programs share, with the compiler's options that they have: what takes the
# compiler longest, parsed once.
function(megamoe_test_headers target)
  if(TARGET ${target})
    return()
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/${target}.cc "")
  add_library(${target} OBJECT ${PROJECT_BINARY_DIR}/${target}.cc)
  target_link_libraries(${target} PRIVATE megamoe GTest::gtest OpenMP::OpenMP_CXX)
  target_precompile_headers(${target} PRIVATE <gtest/gtest.h> <fmt/format.h> <nlohmann/json.hpp> <filesystem>
                            <functional> <map> <random> <string> <vector>)
  target_compile_options(${target} PRIVATE ${ARGN})
  megamoe_defaults(${target})
endfunction()

# Gives a test program precompiled headers and, if `light` is true, the options of MEGAMOE_LIGHT, which the headers have, too.
function(megamoe_test_program name light)
  set(headers megamoe_test_headers)
  set(options)
  if(light AND CMAKE_BUILD_TYPE STREQUAL "Release")
    set(headers megamoe_light_test_headers)
    set(options ${MEGAMOE_LIGHT})
  endif()
  megamoe_test_headers(${headers} ${options})
  target_precompile_headers(${name} REUSE_FROM ${headers})
  target_compile_options(${name} PRIVATE ${options})
endfunction()

# megamoe_test(name [LIGHT] file...): one test program of these files; LIGHT: what takes its time is not in them.
function(megamoe_test name)
  if(NOT MEGAMOE_TESTS)
    return()
  endif()
  cmake_parse_arguments(test "LIGHT" "" "" ${ARGN})
  add_executable(${name} ${test_UNPARSED_ARGUMENTS})
  megamoe_test_program(${name} ${test_LIGHT})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE megamoe GTest::gtest_main OpenMP::OpenMP_CXX)
  target_compile_definitions(${name} PRIVATE MEGAMOE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  megamoe_defaults(${name})
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()
