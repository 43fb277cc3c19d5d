//! Plain Rust with four lanes, as in SSE2 and NEON: for any processor.

use half::{bf16, f16};

use super::{Simd, Task};
use crate::reduce::half_floats::{narrow_bf16, narrow_one_f16, widen_bf16, widen_one_f16};

/// Needs no special instructions.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 4;

#[inline(always)]
fn zip<A: Copy, B: Copy, C>(a: [A; LANES], b: [B; LANES], each: impl Fn(A, B) -> C) -> [C; LANES] {
    [each(a[0], b[0]), each(a[1], b[1]), each(a[2], b[2]), each(a[3], b[3])]
}

#[inline(never)]
fn outlined<T: Task>(task: T) -> T::Output {
    task.run(Portable)
}

impl Simd for Portable {
    type F32 = [f32; LANES];
    type Mask = [bool; LANES];
    const LANES: usize = LANES;
    const ROWS: usize = 6;
    const WIDE_ROWS: usize = 0;
    const TERMS: usize = 1;

    #[inline(always)]
    fn call<T: Task>(self, task: T) -> T::Output {
        outlined(task)
    }
    #[inline(always)]
    fn splat(self, value: f32) -> [f32; LANES] {
        [value; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> [f32; LANES] {
        // SAFETY: the caller guarantees four elements.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize) -> [f32; LANES] {
        // SAFETY: the caller guarantees `count` elements.
        let element = |lane| if lane < count { unsafe { from.add(lane).read() } } else { 0.0 };
        [element(0), element(1), element(2), element(3)]
    }
    #[inline(always)]
    unsafe fn store(self, values: [f32; LANES], to: *mut f32) {
        // SAFETY: the caller guarantees four elements.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(values) }
    }
    #[inline(always)]
    unsafe fn store_first(self, values: [f32; LANES], to: *mut f32, count: usize) {
        let write = |lane: usize| {
            if lane < count {
                // SAFETY: the caller guarantees `count` elements.
                unsafe { to.add(lane).write(values[lane]) }
            }
        };
        write(0);
        write(1);
        write(2);
        write(3);
    }
    #[inline(always)]
    fn prefetch(self, _: *const f32) {}
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> [f32; LANES] {
        // SAFETY: the caller guarantees four bytes.
        unsafe { from.cast::<[u8; LANES]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_places(self, from: *const u8) -> [f32; LANES] {
        // SAFETY: the caller guarantees four bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read_unaligned() };
        bytes.map(|byte| f32::from_bits(u32::from(byte)))
    }
    #[inline(always)]
    unsafe fn load_four(self, from: *const f32) -> [f32; LANES] {
        // SAFETY: the caller guarantees four elements.
        unsafe { self.load(from) }
    }
    #[inline(always)]
    fn pick(self, values: [f32; LANES], places: [f32; LANES]) -> [f32; LANES] {
        places.map(|place| values[place.to_bits() as usize % LANES])
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> [f32; LANES] {
        // SAFETY: the caller guarantees four elements.
        unsafe { from.cast::<[bf16; LANES]>().read_unaligned() }.map(widen_bf16)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, values: [f32; LANES], to: *mut bf16) {
        // SAFETY: the caller guarantees four elements.
        unsafe { to.cast::<[bf16; LANES]>().write_unaligned(values.map(narrow_bf16)) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> [f32; LANES] {
        // SAFETY: the caller guarantees four elements.
        unsafe { from.cast::<[f16; LANES]>().read_unaligned() }.map(widen_one_f16)
    }
    #[inline(always)]
    unsafe fn store_f16(self, values: [f32; LANES], to: *mut f16) {
        // SAFETY: the caller guarantees four elements.
        unsafe { to.cast::<[f16; LANES]>().write_unaligned(values.map(narrow_one_f16)) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, values: [f32; LANES], to: *mut u8) {
        // SAFETY: the caller guarantees four bytes.
        unsafe { to.cast::<[u8; LANES]>().write_unaligned(values.map(|value| value as u8)) }
    }
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        for i in 0..LANES {
            for j in 0..LANES {
                // SAFETY: the caller guarantees the elements of both matrices.
                unsafe { to.add(j * to_row + i).write(from.add(i * from_row + j).read()) }
            }
        }
    }
    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        // Without the instruction, `f32::mul_add` is a call that takes fifty times as long.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            zip(zip(a, b, |a, b| (a, b)), c, |(a, b), c| a.mul_add(b, c))
        } else {
            zip(zip(a, b, |a, b| a * b), c, |product, c| product + c)
        }
    }
    #[inline(always)]
    fn greater(self, a: [f32; LANES], b: [f32; LANES]) -> [bool; LANES] {
        zip(a, b, |a, b| a > b)
    }
    #[inline(always)]
    fn equal(self, a: [f32; LANES], b: [f32; LANES]) -> [bool; LANES] {
        zip(a, b, |a, b| a == b)
    }
    #[inline(always)]
    fn select(self, mask: [bool; LANES], then: [f32; LANES], otherwise: [f32; LANES]) -> [f32; LANES] {
        zip(mask, zip(then, otherwise, |then, otherwise| (then, otherwise)), |mask, (then, otherwise)| {
            if mask { then } else { otherwise }
        })
    }
}
