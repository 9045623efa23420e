# Makes a C++ source of the files of a page:
#
#   cmake -DOUT=page_assets.cpp -DHTML=page.html -DSTYLE=style.css "-DPROGRAM=a.js;b.js" -P MakePage.cmake
set(text "// Made by cmake/MakePage.cmake.\n#include \"report/page_assets.h\"\n\nnamespace fsdp::report {\n\n")
foreach(part HTML STYLE PROGRAM)
  set(content "")
  foreach(file IN LISTS ${part})
    file(READ ${file} of_file)
    string(APPEND content "${of_file}")
  endforeach()
  string(SUBSTRING ${part} 0 1 first)
  string(SUBSTRING ${part} 1 -1 others)
  string(TOLOWER ${others} others)
  string(APPEND text "const std::string_view kPage${first}${others} = R\"page(${content})page\";\n\n")
endforeach()
string(APPEND text "}  // namespace fsdp::report\n")
file(WRITE ${OUT} "${text}")
