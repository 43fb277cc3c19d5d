/* The system's types that UCX's headers use; stddef.h says why they are defined here. */
#ifndef UCX_SYS_STUB_SYS_TYPES_H
#define UCX_SYS_STUB_SYS_TYPES_H

#include <stddef.h>

typedef __PTRDIFF_TYPE__ ssize_t;

#endif
