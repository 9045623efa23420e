# Kernels of the library's own, src/cuda/*.cu, if there is a compiler for CUDA: pip's wheel of it beside torch, or a toolkit's. Without one,
# torch's operators do the same. By commands, not as a language of CMake's, which wants a whole toolkit. What the objects need of CUDA's
# runtime is in the library that torch has loaded.
file(GLOB fsdp_nvcc_folders ${FSDP_TORCH_ROOT}/../nvidia/*/bin)
find_program(FSDP_NVCC nvcc HINTS ${fsdp_nvcc_folders} ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin DOC "nvcc, or empty")
set(FSDP_CUDA_ARCHITECTURES 80 90 100 CACHE STRING "GPUs for which kernels are compiled; the newest one's are compiled again for later ones")
if(NOT FSDP_NVCC)
  message(STATUS "libfsdp: no nvcc, so torch's operators in place of kernels (its wheel: nvidia-cuda-nvcc, of torch's version of CUDA)")
  return()
endif()
message(STATUS "libfsdp: kernels for compute ${FSDP_CUDA_ARCHITECTURES}, by ${FSDP_NVCC}")

set(fsdp_generate)
foreach(architecture ${FSDP_CUDA_ARCHITECTURES})
  list(APPEND fsdp_generate -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
list(SORT FSDP_CUDA_ARCHITECTURES COMPARE NATURAL)
list(GET FSDP_CUDA_ARCHITECTURES -1 fsdp_newest)
list(APPEND fsdp_generate -gencode arch=compute_${fsdp_newest},code=compute_${fsdp_newest})

file(GLOB fsdp_kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cu)
foreach(source ${fsdp_kernels})
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda
    # As the library: see -ffp-contract=off.
    COMMAND ${FSDP_NVCC} -c ${source} -o ${object} -MD -MF ${object}.d -ccbin ${CMAKE_CXX_COMPILER} -std=c++20 -O3 --fmad=false
            -Xcompiler=-fPIC,-fvisibility=hidden -I${CMAKE_CURRENT_SOURCE_DIR}/src -I${CMAKE_CURRENT_SOURCE_DIR}/include
            -isystem ${FSDP_TORCH_ROOT}/include ${fsdp_generate}
    DEPENDS ${source}
    DEPFILE ${object}.d
    COMMENT "Compiling src/cuda/${name}.cu"
    VERBATIM)
  target_sources(fsdp PRIVATE ${object})
endforeach()
file(GLOB fsdp_launchers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/*.cpp)
target_sources(fsdp PRIVATE ${fsdp_launchers})
