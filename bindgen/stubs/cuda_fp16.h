/* nccl.h includes this header but uses nothing of it: buffers are `void *` and an enum gives their element type. */
#ifndef NCCL_SYS_STUB_CUDA_FP16_H
#define NCCL_SYS_STUB_CUDA_FP16_H
#endif
