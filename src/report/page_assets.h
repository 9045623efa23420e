#pragma once

#include <string_view>

namespace fsdp::report {

/// timeline_page.html with its style and its programs, as cmake/MakePage.cmake puts them into the library. The page has places for the
/// rest, which are marked {{style}}, {{data}} and {{program}}; the programs are one after the other.
extern const std::string_view kPageHtml;
extern const std::string_view kPageStyle;
extern const std::string_view kPageProgram;

}  // namespace fsdp::report
