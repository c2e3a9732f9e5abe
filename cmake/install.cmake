# What `cmake --install` puts where: find_package(megamoe) then gives the target megamoe::megamoe.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/megamoe)
install(TARGETS megamoe EXPORT megamoe ARCHIVE COMPONENT library)
install(DIRECTORY include/megamoe TYPE INCLUDE COMPONENT library)
install(EXPORT megamoe NAMESPACE megamoe:: FILE megamoe-targets.cmake DESTINATION ${package_dir} COMPONENT library)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/megamoe-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
configure_file(cmake/megamoe-config.cmake.in megamoe-config.cmake @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/megamoe-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/megamoe-config-version.cmake
        DESTINATION ${package_dir} COMPONENT library)
