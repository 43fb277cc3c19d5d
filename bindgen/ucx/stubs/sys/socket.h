/* Socket addresses as on Linux: endpoints may be created from one, which these bindings do not do. Only size and
 * alignment count. */
#ifndef UCX_SYS_STUB_SYS_SOCKET_H
#define UCX_SYS_STUB_SYS_SOCKET_H

typedef unsigned int socklen_t;

struct sockaddr {
    unsigned short sa_family;
    char sa_data[14];
};

struct sockaddr_storage {
    unsigned short ss_family;
    char ss_padding[118];
    unsigned long ss_align;
};

#endif
