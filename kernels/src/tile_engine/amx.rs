//! AMX: eight tile registers of 16 rows of 64 bytes.
//!
//! Four tiles hold the sums of a block, and in each step two tiles of `a` and two of `b` are loaded and multiplied in all
//! four combinations: one load for each product, so that the loads fit beside them. The loops over steps and segments are
//! one piece of assembly, because Rust knows no tile registers and may not keep anything in them between two pieces.
//!
//! Tile registers are 8 KiB of state that the kernel saves on every context switch, so a process has to ask for them, once
//! (Linux, `Documentation/arch/x86/xstate.rst`). [`engine`] asks at its first call. A thread's tiles are configured at the
//! beginning of a pass and released at its end.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _MM_HINT_T1, _mm_prefetch, _xgetbv};
use std::sync::OnceLock;

use nix::libc;

use super::{Begin, DEPTH, Operands, SIDE, SUMS, TILE, TileEngine};
use crate::gemm::prefetch::Prefetch;

/// Exists only if the processor has AMX with bf16 and this process may use it.
struct Amx(());

/// The engine, if the processor has its instructions and the kernel permits their use.
pub(super) fn engine() -> Option<&'static dyn TileEngine> {
    static ENGINE: OnceLock<Option<Amx>> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| (is_in_the_processor() && ask_for_permission()).then_some(Amx(())));
    engine.as_ref().map(|engine| engine as &dyn TileEngine)
}

/// Whether the processor has tiles and their products of bf16, and the kernel manages the tiles' state.
fn is_in_the_processor() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // Tile configuration and tile data.
    const STATES: u64 = 0b11 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || !is_x86_feature_detected!("xsave") {
        return false;
    }
    let features = __cpuid_count(7, 0).edx;
    // SAFETY: the processor has the instruction, and the kernel has enabled it (OSXSAVE).
    let states = unsafe { _xgetbv(0) };
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && states & STATES == STATES
}

/// Asks the kernel for tile registers for all threads of this process. It refuses if it is older than 5.16, or if a
/// thread has a stack for signals that is too small for them.
fn ask_for_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
}

/// The tiles' extents, in the layout of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Whole tiles in all eight registers.
const WHOLE_TILES: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (row_bytes[tile], rows[tile]) = (64, SIDE as u8);
        tile += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

impl TileEngine for Amx {
    fn configure(&self) {
        // SAFETY: the type exists only if the processor has the instruction; the configuration is valid.
        unsafe { configure() }
    }

    fn release(&self) {
        // SAFETY: as above.
        unsafe { release() }
    }

    unsafe fn multiply(&self, operands: &Operands, begin: Begin, sums: &mut [f32; SUMS], ahead: Prefetch) {
        for line in ahead.lines() {
            // SAFETY: a hint, for any address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
        }
        // SAFETY: as above; the caller's promise.
        unsafe { multiply(operands, begin, sums) }
    }
}

/// # Safety
/// The processor has AMX.
unsafe fn configure() {
    // SAFETY: the caller's promise; 64 bytes are read. The tiles are zeroed, and nothing else is changed.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &WHOLE_TILES, options(nostack, readonly, preserves_flags));
    }
}

/// # Safety
/// The processor has AMX.
unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}

/// Adds the product of `operands` to `sums`, or overwrites them with it.
///
/// # Safety
/// The processor has AMX, and the calling thread is configured; the operands can be read.
unsafe fn multiply(operands: &Operands, begin: Begin, sums: &mut [f32; SUMS]) {
    let &Operands { a, a_row, a_segment, b, b_segment, steps, segments } = operands;
    // From the end of a segment to the beginning of the next one, in bytes. May be negative.
    let next = |segment: usize, step: usize| {
        (segment as isize).wrapping_sub((steps * step) as isize).wrapping_mul(2)
    };
    // SAFETY: the caller guarantees the instructions and the operands; `sums` has four tiles. Tile registers are
    // not used by Rust.
    unsafe {
        asm!(
            "test {step}, {step}",
            "jnz 4f",
            "tileloadd tmm0, [{sums} + {line}*1]",
            "tileloadd tmm1, [{sums} + {line}*1 + 1024]",
            "tileloadd tmm2, [{sums} + {line}*1 + 2048]",
            "tileloadd tmm3, [{sums} + {line}*1 + 3072]",
            "jmp 2f",
            "4:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "mov {step}, {steps}",
            "3:",
            "tileloadd tmm4, [{a0} + {row}*1]",
            "tileloadd tmm6, [{b0} + {line}*1]",
            "tileloadd tmm7, [{b1} + {line}*1]",
            "tileloadd tmm5, [{a1} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, {a_tile}",
            "add {a1}, {a_tile}",
            "add {b0}, {b_tile}",
            "add {b1}, {b_tile}",
            "dec {step}",
            "jnz 3b",
            "add {a0}, {a_next}",
            "add {a1}, {a_next}",
            "add {b0}, {b_next}",
            "add {b1}, {b_next}",
            "dec {segments}",
            "jnz 2b",
            "tilestored [{sums} + {line}*1], tmm0",
            "tilestored [{sums} + {line}*1 + 1024], tmm1",
            "tilestored [{sums} + {line}*1 + 2048], tmm2",
            "tilestored [{sums} + {line}*1 + 3072], tmm3",
            sums = in(reg) sums.as_mut_ptr(),
            line = in(reg) 4 * SIDE,
            row = in(reg) 2 * a_row,
            a0 = inout(reg) a[0] => _,
            a1 = inout(reg) a[1] => _,
            b0 = inout(reg) b[0] => _,
            b1 = inout(reg) b[1] => _,
            steps = in(reg) steps,
            // At first whether to begin with zeros.
            step = inout(reg) usize::from(begin == Begin::Zero) => _,
            segments = inout(reg) segments => _,
            a_next = in(reg) next(a_segment, DEPTH),
            b_next = in(reg) next(b_segment, TILE),
            a_tile = const 2 * DEPTH,
            b_tile = const 2 * TILE,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests;
