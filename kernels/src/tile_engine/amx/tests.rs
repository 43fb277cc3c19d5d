//! The assembly on processors without AMX: its instructions trap there, and a signal handler carries them out.
//!
//! So loops, addresses, strides and the order of tiles are tested everywhere, and the handler's arithmetic is that of the
//! emulation. Where the processor has AMX, it computes the same itself.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use half::bf16;

use super::super::arithmetic::tile_product;
use super::super::emulated::Emulated;
use super::*;
use crate::level;
use crate::reference::{narrow, random};

/// The tile registers of the only thread that uses them.
struct Registers {
    configured: bool,
    tiles: [[u8; 1024]; 8],
}

static REGISTERS: Mutex<Registers> = Mutex::new(Registers { configured: false, tiles: [[0; 1024]; 8] });

/// Instructions that were carried out.
static TRAPS: AtomicUsize = AtomicUsize::new(0);

/// An instruction with the prefix C4, as the Intel manual's volume 2, chapter 2, describes it.
struct Instruction {
    /// The operation, with its mandatory prefix: 0 for none, 2 for F3, 3 for F2.
    operation: (u8, u8),
    /// Registers of the field `reg` and of `vvvv`, and of `r/m` if that is one.
    tiles: [usize; 3],
    /// Base, stride and displacement of a memory operand; the address itself without an index.
    address: usize,
    stride: usize,
    len: usize,
}

/// Decodes the instruction at `code`, which uses the registers `general` (in the order of their numbers).
///
/// # Safety
/// An instruction can be read.
unsafe fn decode(code: *const u8, general: &[usize; 16]) -> Option<Instruction> {
    // SAFETY: the caller's promise.
    let byte = |at: usize| unsafe { code.add(at).read() };
    let (first, second) = (byte(1), byte(2));
    if byte(0) != 0xC4 || first & 0x1F != 2 || second & 0x84 != 0 {
        return None;
    }
    let extended = |bit: u8, low: u8| usize::from(low & 7) + if first & bit == 0 { 8 } else { 0 };
    let modrm = byte(4);
    let (mode, rm) = (modrm >> 6, modrm & 7);
    let tiles = [usize::from(modrm >> 3 & 7), usize::from(!second >> 3 & 15), usize::from(rm)];
    let mut instruction =
        Instruction { operation: (byte(3), second & 3), tiles, address: 0, stride: 0, len: 5 };
    if mode == 3 {
        return Some(instruction);
    }
    if rm == 4 {
        let sib = byte(5);
        let index = extended(0x40, sib >> 3);
        instruction.address = general[extended(0x20, sib)];
        instruction.stride = if index == 4 { 0 } else { general[index] << (sib >> 6) };
        instruction.len = 6;
        if mode == 0 && sib & 7 == 5 {
            return None;
        }
    } else if mode == 0 && rm == 5 {
        return None;
    } else {
        instruction.address = general[extended(0x20, rm)];
    }
    let displacement = match mode {
        1 => isize::from(byte(instruction.len) as i8),
        2 => {
            let bytes: [u8; 4] = std::array::from_fn(|at| byte(instruction.len + at));
            i32::from_le_bytes(bytes) as isize
        }
        _ => 0,
    };
    instruction.len += [0, 1, 4][usize::from(mode)];
    instruction.address = instruction.address.wrapping_add_signed(displacement);
    Some(instruction)
}

/// Carries out a decoded instruction. False if it is none of those of the assembly.
///
/// # Safety
/// Its memory operand exists.
unsafe fn carry_out(instruction: &Instruction, registers: &mut Registers) -> bool {
    let &Instruction { operation, tiles: [tile, other, from], address, stride, .. } = instruction;
    let row = |row: usize| ptr::with_exposed_provenance_mut::<u8>(address.wrapping_add(row * stride));
    match operation {
        (0x49, 0) if address != 0 => {
            // SAFETY: the caller's promise: 64 bytes.
            let bytes: [u8; 64] = unsafe { row(0).cast::<[u8; 64]>().read() };
            let whole = |tile: usize| bytes[16 + 2 * tile] == 64 && bytes[48 + tile] == 16;
            registers.configured = bytes[0] == 1 && bytes[1] == 0 && (0..8).all(whole);
            registers.tiles = [[0; 1024]; 8];
        }
        (0x49, 0) => registers.configured = false,
        _ if !registers.configured => return false,
        (0x49, 3) => registers.tiles[tile] = [0; 1024],
        (0x4B, 3) => {
            for (at, line) in registers.tiles[tile].chunks_exact_mut(64).enumerate() {
                // SAFETY: the caller's promise.
                unsafe { ptr::copy_nonoverlapping(row(at), line.as_mut_ptr(), 64) };
            }
        }
        (0x4B, 2) => {
            for (at, line) in registers.tiles[tile].chunks_exact(64).enumerate() {
                // SAFETY: the caller's promise.
                unsafe { ptr::copy_nonoverlapping(line.as_ptr(), row(at), 64) };
            }
        }
        (0x5C, 2) => {
            let element =
                |tile: &[u8; 1024], at: usize| bf16::from_le_bytes([tile[2 * at], tile[2 * at + 1]]);
            let [a, b] = [from, other]
                .map(|of| std::array::from_fn::<bf16, TILE, _>(|at| element(&registers.tiles[of], at)));
            let mut sums: [f32; SIDE * SIDE] = std::array::from_fn(|at| {
                let bytes = registers.tiles[tile][4 * at..].first_chunk().expect("four bytes");
                f32::from_le_bytes(*bytes)
            });
            tile_product(&mut sums, &a, DEPTH, &b);
            registers.tiles[tile] = bytemuck::cast(sums);
        }
        _ => return false,
    }
    true
}

extern "C" fn on_illegal_instruction(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    use libc::*;
    const ORDER: [c_int; 16] = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10,
        REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    // SAFETY: the kernel passes the context of the interrupted thread, which is stopped at the instruction.
    let carried_out = unsafe {
        let registers = &mut (*context.cast::<ucontext_t>()).uc_mcontext.gregs;
        let general = ORDER.map(|register| registers[register as usize] as usize);
        let instruction = decode(registers[REG_RIP as usize] as *const u8, &general);
        instruction.is_some_and(|instruction| {
            registers[REG_RIP as usize] += instruction.len as i64;
            TRAPS.fetch_add(1, Relaxed);
            // The test locks nothing while its thread runs the assembly.
            REGISTERS.try_lock().is_ok_and(|mut state| carry_out(&instruction, &mut state))
        })
    };
    if !carried_out {
        // SAFETY: a second time the instruction ends the process.
        unsafe { signal(SIGILL, SIG_DFL) };
    }
}

/// Carries out AMX instructions while it exists. One at a time.
struct Trap {
    before: libc::sigaction,
    _alone: std::sync::MutexGuard<'static, ()>,
}

impl Trap {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // The handler must not read the environment.
        level::detect();
        // SAFETY: the handler has the signature for SA_SIGINFO; both structures are valid, and zero is.
        let before = unsafe {
            let (mut action, mut before): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
            action.sa_sigaction = on_illegal_instruction as *const () as usize;
            // On the stack of the thread: one for signals may be too small.
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, &mut before), 0);
            before
        };
        Trap { before, _alone: alone }
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        // SAFETY: this is the action from before.
        unsafe { libc::sigaction(libc::SIGILL, &self.before, ptr::null_mut()) };
    }
}

#[test]
fn the_assembly_computes_what_the_emulation_does() {
    let is_real = engine().is_some();
    if !is_real {
        println!("AMX: not seen; its instructions are emulated one by one");
    }
    let trap = (!is_real).then(Trap::new);
    let extents = [(1, 1, DEPTH, 0), (1, 3, 3 * DEPTH, 0), (3, 2, 6, 40), (2, 1, 70, 1)];
    for (begin, (segments, steps, a_row, gap)) in
        extents.into_iter().flat_map(|extents| [(Begin::Sums, extents), (Begin::Zero, extents)])
    {
        let a_segment = BLOCK_ROWS * a_row + gap;
        let b_segment = steps * TILE + 32 * gap;
        let a = narrow(&random(segments * a_segment + BLOCK_ROWS * a_row + steps * DEPTH, 1));
        let b = narrow(&random(2 * segments * b_segment, 2));
        let operands = Operands {
            a: [a[1..].as_ptr(), a[SIDE * a_row..].as_ptr()],
            a_row,
            a_segment,
            b: [b.as_ptr(), b[segments * b_segment..].as_ptr()],
            b_segment,
            steps,
            segments,
        };
        let before: [f32; SUMS] = random(SUMS, 3).try_into().unwrap();
        let (mut actual, mut expected) = (before, before);
        let traps = TRAPS.load(Relaxed);
        // SAFETY: the operands exist; the instructions are those of the processor, or are trapped.
        unsafe {
            Emulated.multiply(&operands, begin, &mut expected, Prefetch::NONE);
            configure();
            multiply(&operands, begin, &mut actual);
            release();
        }
        assert_eq!(
            actual.map(f32::to_bits),
            expected.map(f32::to_bits),
            "{segments} segments of {steps} steps, from {begin:?}"
        );
        assert_ne!(expected, before);
        let instructions = if is_real { 0 } else { 2 + 8 + 8 * segments * steps };
        assert_eq!(TRAPS.load(Relaxed) - traps, instructions);
    }
    drop(trap);
}

/// Rows of two groups.
const BLOCK_ROWS: usize = 2 * SIDE;

#[test]
fn the_configuration_has_the_layout_of_the_manual() {
    assert_eq!((size_of::<Configuration>(), align_of::<Configuration>()), (64, 64));
    assert_eq!(std::mem::offset_of!(Configuration, row_bytes), 16);
    assert_eq!(std::mem::offset_of!(Configuration, rows), 48);
}
