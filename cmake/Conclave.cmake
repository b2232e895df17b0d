# Settings and helper functions shared by every target.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1")
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1 -fno-omit-frame-pointer")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

# -ffp-contract=off: the compiler must not fuse what the numerics contract keeps apart (docs/numerics.md).
add_compile_options(-ffp-contract=off "-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=")
set(CONCLAVE_WARNINGS -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough)
# g++ 12 sees moves of a std::variant as reads of the alternatives that it does not hold.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND CONCLAVE_WARNINGS -Wno-maybe-uninitialized)
endif()
if(CONCLAVE_WERROR)
  list(APPEND CONCLAVE_WARNINGS -Werror)
endif()
if(CONCLAVE_SANITIZE)
  add_compile_options(-fsanitize=${CONCLAVE_SANITIZE} -fno-sanitize-recover=all)
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
  add_link_options(-fsanitize=${CONCLAVE_SANITIZE})
  # g++ cannot follow fences there. Asio's handlers are ordered by its locks as well.
  if(CONCLAVE_SANITIZE MATCHES "thread")
    add_compile_definitions(BOOST_ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(GTest REQUIRED)

# conclave_add_subdirectories(dir...): adds those that have a CMakeLists.txt.
function(conclave_add_subdirectories)
  foreach(dir IN LISTS ARGN)
    if(EXISTS "${CMAKE_SOURCE_DIR}/${dir}/CMakeLists.txt")
      add_subdirectory("${CMAKE_SOURCE_DIR}/${dir}" "${CMAKE_BINARY_DIR}/${dir}")
    endif()
  endforeach()
endfunction()

# conclave_library(name SOURCES a.cc ... DEPS lib ... PRIVATE_DEPS lib ...): a static library, included from the
# repository root. DEPS are visible to its users; PRIVATE_DEPS (gRPC, UCX, yaml-cpp ...) only to its own .cc files.
function(conclave_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  if(ARG_SOURCES)
    add_library(${name} STATIC ${ARG_SOURCES})
    target_compile_options(${name} PRIVATE ${CONCLAVE_WARNINGS})
    target_include_directories(${name} PUBLIC "${CMAKE_SOURCE_DIR}")
    target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE "${CMAKE_SOURCE_DIR}")
    target_link_libraries(${name} INTERFACE ${ARG_DEPS})
  endif()
endfunction()

# conclave_binary(name SOURCES ... DEPS ...): a program in build/<preset>/bin.
function(conclave_binary name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_compile_options(${name} PRIVATE ${CONCLAVE_WARNINGS})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
endfunction()

# conclave_test(name SUITE suite SOURCES ... DEPS ... [LABELS l ...] [TIMEOUT s] [SERIAL]): one GoogleTest program, one
# ctest entry. SUITE becomes a label, so that `check` can print the time per suite.
function(conclave_test name)
  cmake_parse_arguments(ARG "SERIAL" "SUITE;TIMEOUT" "SOURCES;DEPS;LABELS;ARGS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  conclave_binary(${name} SOURCES ${ARG_SOURCES} DEPS ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS} WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES
    LABELS "suite:${ARG_SUITE};${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT "CONCLAVE_TESTDATA_DIR=${CONCLAVE_TESTDATA_DIR};CONCLAVE_BIN_DIR=${CMAKE_BINARY_DIR}/bin")
  if(ARG_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()
