/* Just enough of the CUDA runtime for nccl.h to parse: the two handle types its prototypes name.
 * Both are pointers to types nobody outside CUDA looks into. The runtime's version macro stays
 * undefined on purpose, so that nccl.h asks for no further CUDA header. */
#ifndef NCCL_SYS_STUB_CUDA_RUNTIME_H
#define NCCL_SYS_STUB_CUDA_RUNTIME_H

#include <stddef.h>

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

#endif
