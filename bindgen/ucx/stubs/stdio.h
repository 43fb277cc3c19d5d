/* Functions that print to a `FILE` are declared by UCX's headers, and not bound. */
#ifndef UCX_SYS_STUB_STDIO_H
#define UCX_SYS_STUB_STDIO_H

typedef struct ucx_sys_stub_file FILE;

#endif
