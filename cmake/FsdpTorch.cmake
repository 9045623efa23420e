# Finds LibTorch in the pip wheel, for the build and (installed beside fsdpConfig.cmake) for the package's users. Sets FSDP_TORCH_ROOT and
# FSDP_TORCH_VERSION, and makes fsdp::torch: an exported target can refer to that name, but not to paths of the machine that built it.
#
# torch's own TorchConfig.cmake is used with FSDP_CUDA only. PyPI's wheel for Linux is the CUDA build, and its TorchConfig fails where there is
# no whole CUDA toolkit, although CPU ranks need no header and no library of CUDA's. It also adds MKL's directories to every run path.
find_path(FSDP_TORCH_CMAKE_DIR Torch/TorchConfig.cmake DOC "share/cmake of the torch wheel"
          HINTS ${Torch_DIR}/.. ${CMAKE_PREFIX_PATH} ENV CMAKE_PREFIX_PATH)
if(NOT FSDP_TORCH_CMAKE_DIR)
  message(FATAL_ERROR "libfsdp: no LibTorch in CMAKE_PREFIX_PATH; pass "
                      "-DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')")
endif()
get_filename_component(FSDP_TORCH_ROOT ${FSDP_TORCH_CMAKE_DIR}/../.. ABSOLUTE)
include(${FSDP_TORCH_CMAKE_DIR}/Torch/TorchConfigVersion.cmake)
set(FSDP_TORCH_VERSION ${PACKAGE_VERSION})
if(FSDP_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "libfsdp: needs torch 2.11 or later, found ${FSDP_TORCH_VERSION} in ${FSDP_TORCH_ROOT}")
endif()

if(TARGET fsdp::torch)
  return()
endif()
add_library(fsdp::torch INTERFACE IMPORTED GLOBAL)
if(FSDP_CUDA)
  find_package(Torch REQUIRED PATHS ${FSDP_TORCH_CMAKE_DIR} NO_DEFAULT_PATH)
  target_link_libraries(fsdp::torch INTERFACE ${TORCH_LIBRARIES})
else()
  foreach(library c10 torch_cpu)
    add_library(fsdp::${library} SHARED IMPORTED GLOBAL)
    set_target_properties(fsdp::${library} PROPERTIES IMPORTED_LOCATION ${FSDP_TORCH_ROOT}/lib/lib${library}.so)
  endforeach()
  target_include_directories(fsdp::torch INTERFACE ${FSDP_TORCH_ROOT}/include ${FSDP_TORCH_ROOT}/include/torch/csrc/api/include)
  target_compile_definitions(fsdp::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  target_link_libraries(fsdp::torch INTERFACE fsdp::torch_cpu fsdp::c10)
endif()
