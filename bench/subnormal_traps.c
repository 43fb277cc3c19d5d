// A library for LD_PRELOAD that counts the instructions with a subnormal operand, or with a result below the smallest normal
// number, and writes both counts to the file TRAPS_OUT at exit. Many processors need over a hundred cycles for one.
//
// The processor raises SIGFPE before such an instruction. The handler counts it, masks the exceptions and sets the trap flag;
// after the instruction SIGTRAP comes, whose handler unmasks them again. Threads take the mask of the thread that starts them.
// Linux on x86-64 only: gcc -O2 -shared -fPIC subnormal_traps.c -o subnormal_traps.so

#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>
#include <xmmintrin.h>

#define FLAGS 0x3fu              // what happened since the flags were cleared
#define DENORMAL 0x02u           // a flag: a subnormal operand
#define UNDERFLOW 0x10u          // a flag: a result below the smallest normal number
#define MASK_ALL 0x1f80u
#define MASK_BOTH (0x100u | 0x800u)  // those of DENORMAL and UNDERFLOW
#define TRAP_FLAG 0x100l

static unsigned long operands, results;

static void before(int signal, siginfo_t* info, void* context) {
    (void)signal, (void)info;
    mcontext_t* of = &((ucontext_t*)context)->uc_mcontext;
    if (of->fpregs->mxcsr & DENORMAL) __atomic_add_fetch(&operands, 1, __ATOMIC_RELAXED);
    else __atomic_add_fetch(&results, 1, __ATOMIC_RELAXED);
    of->fpregs->mxcsr = (of->fpregs->mxcsr | MASK_ALL) & ~FLAGS;
    of->gregs[REG_EFL] |= TRAP_FLAG;
}

static void after(int signal, siginfo_t* info, void* context) {
    (void)signal, (void)info;
    mcontext_t* of = &((ucontext_t*)context)->uc_mcontext;
    of->fpregs->mxcsr &= ~(FLAGS | MASK_BOTH);
    of->gregs[REG_EFL] &= ~TRAP_FLAG;
}

static void write_counts(void) {
    _mm_setcsr(_mm_getcsr() | MASK_ALL);
    FILE* out = fopen(getenv("TRAPS_OUT"), "w");
    if (out == NULL) return;
    fprintf(out, "%lu %lu\n", operands, results);
    fclose(out);
}

__attribute__((constructor)) static void begin(void) {
    if (getenv("TRAPS_OUT") == NULL) return;
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_NODEFER};
    action.sa_sigaction = before;
    sigaction(SIGFPE, &action, NULL);
    action.sa_sigaction = after;
    sigaction(SIGTRAP, &action, NULL);
    atexit(write_counts);
    _mm_setcsr(_mm_getcsr() & ~(FLAGS | MASK_BOTH));
}
