/* Defined here, so that regenerating needs no compiler or system headers and gives the same output on
 * every machine. */
#ifndef NCCL_SYS_STUB_STDDEF_H
#define NCCL_SYS_STUB_STDDEF_H

typedef __SIZE_TYPE__ size_t;
#define NULL ((void *)0)

#endif
