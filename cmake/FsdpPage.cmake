# The page of timelines (src/report/timeline_*.html, .css and .js) becomes a source of the library, so that nothing needs files beside it.
set(page ${CMAKE_CURRENT_SOURCE_DIR}/src/report/timeline)
set(page_program ${page}_data.js ${page}_lanes.js ${page}_side.js ${page}_page.js)
set(page_assets ${CMAKE_CURRENT_BINARY_DIR}/page_assets.cpp)
add_custom_command(
  OUTPUT ${page_assets}
  COMMAND ${CMAKE_COMMAND} -DOUT=${page_assets} -DHTML=${page}_page.html -DSTYLE=${page}_page.css "-DPROGRAM=${page_program}"
          -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/MakePage.cmake
  DEPENDS ${page}_page.html ${page}_page.css ${page_program} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/MakePage.cmake
  VERBATIM)
target_sources(fsdp PRIVATE ${page_assets})
set_source_files_properties(${page_assets} PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
