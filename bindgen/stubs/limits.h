/* The limits that nccl.h uses; stddef.h says why they are defined here. */
#ifndef NCCL_SYS_STUB_LIMITS_H
#define NCCL_SYS_STUB_LIMITS_H

#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)

#endif
