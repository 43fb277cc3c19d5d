/* nccl.h includes this header and uses nothing of it: buffers are `void *` and an enum says what is in them. */
#ifndef NCCL_SYS_STUB_CUDA_FP16_H
#define NCCL_SYS_STUB_CUDA_FP16_H
#endif
