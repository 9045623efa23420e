# Finds LibTorch in the pip wheel, for the build and (installed beside fsdpConfig.cmake) for the package's users. Sets FSDP_TORCH_ROOT and
# FSDP_TORCH_VERSION, and makes fsdp::torch: an exported target can refer to that name, but not to paths of the machine that built it.
#
# torch's own TorchConfig.cmake is not used. For a CUDA build, as PyPI's wheel for Linux is, it fails where there is no whole CUDA toolkit,
# of which nothing is linked here: torch's own libraries load what they need. It also adds MKL's directories to every run path.
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
set(fsdp_torch_libraries c10 torch_cpu)
if(FSDP_CUDA)
  list(APPEND fsdp_torch_libraries c10_cuda torch_cuda)
endif()
foreach(library ${fsdp_torch_libraries})
  if(NOT EXISTS ${FSDP_TORCH_ROOT}/lib/lib${library}.so)
    message(FATAL_ERROR "libfsdp: FSDP_CUDA needs a CUDA build of torch, and ${FSDP_TORCH_ROOT} has no lib/lib${library}.so")
  endif()
  add_library(fsdp::${library} SHARED IMPORTED GLOBAL)
  set_target_properties(fsdp::${library} PROPERTIES IMPORTED_LOCATION ${FSDP_TORCH_ROOT}/lib/lib${library}.so)
  target_link_libraries(fsdp::torch INTERFACE fsdp::${library})
endforeach()
target_include_directories(fsdp::torch INTERFACE ${FSDP_TORCH_ROOT}/include ${FSDP_TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_definitions(fsdp::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)

# Headers of CUDA and NCCL: pip's wheels of them lie beside torch, in a folder per library or in one per version of CUDA. A toolkit will do.
if(FSDP_CUDA)
  foreach(header cuda_runtime_api.h crt/host_config.h nv/target cusparse.h cusolverDn.h nccl.h)
    string(MAKE_C_IDENTIFIER FSDP_INCLUDE_${header} variable)
    file(GLOB folders ${FSDP_TORCH_ROOT}/../nvidia/*/include)
    find_path(${variable} ${header} HINTS ${folders} ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include include/cccl)
    mark_as_advanced(${variable})
    if(NOT ${variable})
      message(FATAL_ERROR "libfsdp: FSDP_CUDA needs ${header}, which is neither beside torch (${FSDP_TORCH_ROOT}/../nvidia) nor in "
                          "CUDA_HOME nor in /usr/local/cuda. Install its wheel (crt/: nvidia-cuda-crt, nv/: nvidia-cuda-cccl, of torch's "
                          "version of CUDA), or pass -D${variable}=the folder that has it")
    endif()
    target_include_directories(fsdp::torch SYSTEM INTERFACE ${${variable}})
  endforeach()
  target_compile_definitions(fsdp::torch INTERFACE USE_C10D_NCCL)
endif()
