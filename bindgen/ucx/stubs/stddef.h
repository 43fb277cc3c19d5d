/* Defined here, so that regenerating needs no compiler or system headers and gives the same output on
 * every machine. */
#ifndef UCX_SYS_STUB_STDDEF_H
#define UCX_SYS_STUB_STDDEF_H

typedef __SIZE_TYPE__ size_t;
#define NULL ((void *)0)

#endif
