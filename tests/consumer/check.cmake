# cmake -DBUILD=<build folder> -DSOURCE=<project> -DCXX=<compiler> -P check.cmake
# Installs the library, builds and runs a project that uses it; then configures one that has it as a folder.
set(work ${BUILD}/consumer)
file(REMOVE_RECURSE ${work})
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component library)
set(configure ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -G Ninja -DCMAKE_CXX_COMPILER=${CXX})
run(${configure} -B ${work}/installed -DMEGAMOE_PREFIX=${work}/prefix)
run(${CMAKE_COMMAND} --build ${work}/installed)
run(${work}/installed/consumer)
# As a folder it brings neither its tool nor its tests along.
run(${configure} -B ${work}/folder -DMEGAMOE_SOURCE=${SOURCE})
if(EXISTS ${work}/folder/megamoe/cli OR EXISTS ${work}/folder/megamoe/tests)
  message(FATAL_ERROR "a project that has MegaMoE as a folder also gets its tool or tests")
endif()
