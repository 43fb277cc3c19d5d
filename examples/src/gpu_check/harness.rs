//! The test harness: memory on the GPU for one check, two launches, and the verdict.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};
use mgpu_kernels::Precision;
use mgpu_kernels::cuda::{Error, Memory, Result, Stream, View};
use mgpu_kernels::{DType, Element, Threads};

use super::bound;
use super::report::{Check, Report};
use super::values::Random;

/// Nothing, or an error that ends all checks.
pub(super) type Outcome = Result<(), Error>;

/// Bytes before and after every buffer that no kernel may write.
const MARGIN: usize = 256;
const MARGIN_BYTE: u8 = 0xa5;
/// Contents of outputs before the first and the second run: a NaN as f32, bf16 and f16, and a large number.
const GARBAGE: [u8; 2] = [0xff, 0x55];

pub(super) struct Harness {
    pub(super) stream: Stream,
    pub(super) threads: Threads,
    pub(super) random: Random,
    pub(super) quick: bool,
    /// Offset of buffers in elements, to make them unaligned for 16-byte accesses.
    pub(super) skew: usize,
    only: Option<String>,
    report: Report,
}

/// Memory with guard margins.
pub(super) struct Buffer {
    memory: Memory,
    dtype: DType,
    begin: usize,
    bytes: usize,
}

impl Buffer {
    pub(super) fn view(&self) -> View<'_> {
        self.memory.slice(self.begin..self.begin + self.bytes).cast(self.dtype)
    }
}

/// An output of a kernel.
#[derive(Clone)]
pub(super) struct Output {
    dtype: DType,
    len: usize,
    /// Initial contents; garbage if `None`.
    holds: Option<Vec<u8>>,
}

impl Output {
    pub(super) fn of(dtype: DType, len: usize) -> Self {
        Output { dtype, len, holds: None }
    }

    /// An output that the kernel also reads.
    pub(super) fn holding<T: Element>(values: &[T]) -> Self {
        let holds = bytes_of(values);
        Output { dtype: T::DTYPE, len: values.len(), holds: Some(holds) }
    }

    /// Activations that are changed in place.
    pub(super) fn activations(dtype: DType, values: &[f32]) -> Self {
        match dtype {
            DType::Bf16 => Self::holding(&narrow(values)),
            DType::F16 => Self::holding(&narrow_f16(values)),
            _ => Self::holding(values),
        }
    }
}

/// The contents of the outputs after a launch.
#[derive(PartialEq)]
pub(super) struct Results {
    outputs: Vec<(DType, Vec<u8>)>,
}

impl Results {
    pub(super) fn bytes(&self, output: usize) -> &[u8] {
        &self.outputs[output].1
    }

    /// An output of f32, bf16 or f16, as f32.
    pub(super) fn floats(&self, output: usize) -> Vec<f32> {
        let (dtype, bytes) = &self.outputs[output];
        match dtype {
            DType::Bf16 => elements(bytes).iter().map(|value: &bf16| value.to_f32()).collect(),
            DType::F16 => elements(bytes).iter().map(|value: &f16| value.to_f32()).collect(),
            _ => elements(bytes),
        }
    }

    pub(super) fn values<T: Element>(&self, output: usize) -> Vec<T> {
        elements(self.bytes(output))
    }
}

fn bytes_of<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

fn elements<T: Element>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

pub(super) fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

fn narrow_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|value| f16::from_f32(*value)).collect()
}

/// The result of one check.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    error: f64,
    bound: f64,
    problem: Option<String>,
    /// The least scale of an error.
    least_scale: f64,
}

impl Verdict {
    /// Compares with a tolerance of `bound` times the element's scale.
    pub(super) fn close(
        &mut self,
        what: &str,
        found: impl IntoIterator<Item = impl Into<f64>>,
        expected: &[f64],
        scale: impl Fn(usize) -> f64,
        bound: f64,
    ) {
        let (mut worst, mut count) = (0.0f64, 0);
        for (i, found) in found.into_iter().enumerate().take(expected.len()) {
            count += 1;
            let (found, expected) = (found.into(), expected[i]);
            let error = (found - expected).abs() / scale(i).max(self.least_scale).max(f64::MIN_POSITIVE);
            // Non-finite differences count as infinite.
            let error = if error.is_nan() { f64::INFINITY } else { error };
            worst = worst.max(error);
            if error > bound {
                self.problem(format!("{what} {i} is {found:e} instead of {expected:e}"));
            }
        }
        if count != expected.len() {
            self.problem(format!("{count} elements of {what} instead of {}", expected.len()));
        }
        // With several comparisons, the one closest to its bound is reported.
        if worst * self.bound >= self.error * bound {
            (self.error, self.bound) = (worst, bound);
        }
    }

    /// Compares bit for bit.
    pub(super) fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, found: &[T], expected: &[T]) {
        let differ = found.iter().zip(expected).position(|(found, expected)| found != expected);
        if let Some(i) = differ {
            let text = format!("{what} {i} is {:?} instead of {:?}", found[i], expected[i]);
            self.problem.get_or_insert(text);
        }
        if found.len() != expected.len() {
            let text = format!("{} elements of {what} instead of {}", found.len(), expected.len());
            self.problem.get_or_insert(text);
        }
    }

    /// Compares f32 bit for bit; all NaNs are equal.
    pub(super) fn same(&mut self, what: &str, found: &[f32], expected: &[f32]) {
        let bits = |values: &[f32]| -> Vec<u32> {
            values
                .iter()
                .map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() })
                .collect()
        };
        let (found_bits, expected_bits) = (bits(found), bits(expected));
        if found_bits != expected_bits {
            let i = found_bits.iter().zip(&expected_bits).position(|(a, b)| a != b).unwrap_or(0);
            let text = format!("{what} {i} is {:e} instead of {:e}", found[i], expected[i]);
            self.problem.get_or_insert(text);
        }
    }

    pub(super) fn problem(&mut self, text: String) {
        self.problem.get_or_insert(text);
    }
}

impl Harness {
    pub(super) fn new(stream: Stream, seed: u64, quick: bool, only: Option<String>) -> Self {
        let threads = Threads::new(1);
        let random = Random::new(seed);
        Harness { stream, threads, random, quick, skew: 0, only, report: Report::default() }
    }

    pub(super) fn finish(self) -> Report {
        self.report
    }

    pub(super) fn fake(&self) -> bool {
        self.stream.device().name().contains(super::FAKE)
    }

    /// True if `--only` was given and contains `text`.
    pub(super) fn names(&self, text: &str) -> bool {
        self.only.as_ref().is_some_and(|only| only.contains(text))
    }

    /// True if tensor cores compute the products of a precision, if any do.
    pub(super) fn tensor_cores(&self, precision: Precision) -> bool {
        let least = if precision == Precision::F16 { (7, 5) } else { (8, 0) };
        self.stream.device().architecture() >= least
    }

    /// A copy of values on the GPU.
    pub(super) fn input<T: Element>(&self, values: &[T]) -> Result<Buffer> {
        self.buffer(T::DTYPE, bytemuck::cast_slice(values))
    }

    /// A copy of activations, rounded to their dtype.
    pub(super) fn activations(&self, dtype: DType, values: &[f32]) -> Result<Buffer> {
        match dtype {
            DType::Bf16 => self.input(&narrow(values)),
            DType::F16 => self.input(&narrow_f16(values)),
            _ => self.input(values),
        }
    }

    fn buffer(&self, dtype: DType, content: &[u8]) -> Result<Buffer> {
        let begin = MARGIN + self.skew * dtype.size();
        let mut all = vec![MARGIN_BYTE; begin + content.len() + MARGIN];
        all[begin..begin + content.len()].copy_from_slice(content);
        let memory = Memory::from_slice(&self.stream, &all)?;
        Ok(Buffer { memory, dtype, begin, bytes: content.len() })
    }

    /// Runs `work` once on outputs with their initial contents, or else `garbage`. The second result is true if the
    /// margins are unchanged.
    pub(super) fn once(
        &self,
        outputs: &[Output],
        garbage: u8,
        work: impl Fn(&Stream, &[View<'_>]) -> Result<()>,
    ) -> Result<(Results, bool)> {
        let buffers = outputs.iter().map(|output| match &output.holds {
            Some(bytes) => self.buffer(output.dtype, bytes),
            None => self.buffer(output.dtype, &vec![garbage; output.len * output.dtype.size()]),
        });
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let views: Vec<View<'_>> = buffers.iter().map(Buffer::view).collect();
        work(&self.stream, &views)?;
        let mut found = Vec::new();
        let mut clean = true;
        for buffer in &buffers {
            let all: Vec<u8> = buffer.memory.to_vec(&self.stream)?;
            let end = buffer.begin + buffer.bytes;
            clean &= all[..buffer.begin].iter().chain(&all[end..]).all(|byte| *byte == MARGIN_BYTE);
            found.push((buffer.dtype, all[buffer.begin..end].to_vec()));
        }
        Ok((Results { outputs: found }, clean))
    }

    /// Runs `work` twice, reports to `verdict` if results differ or something else was written, and returns the first
    /// result.
    pub(super) fn twice(
        &self,
        verdict: &mut Verdict,
        outputs: &[Output],
        work: impl Fn(&Stream, &[View<'_>]) -> Result<()>,
    ) -> Result<Results> {
        let (first, clean) = self.once(outputs, GARBAGE[0], &work)?;
        let (second, clean_again) = self.once(outputs, GARBAGE[1], &work)?;
        if !clean || !clean_again {
            verdict.problem("it writes outside its outputs".into());
        }
        if first != second {
            verdict.problem("two runs differ".into());
        }
        Ok(first)
    }

    /// Runs one check, unless it was not selected. An error means that no further check is possible.
    pub(super) fn check(
        &mut self,
        name: &str,
        shape: impl Display,
        precision: &'static str,
        check: impl FnOnce(&mut Harness, &mut Verdict) -> Result<()>,
    ) -> Outcome {
        if self.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            return Ok(());
        }
        let mut verdict = Verdict { least_scale: bound::least_scale(precision), ..Verdict::default() };
        let outcome = catch_unwind(AssertUnwindSafe(|| check(self, &mut verdict)));
        let problem = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            // The panic message is on standard error.
            Err(_) => Some("a panic".to_owned()),
        };
        let Verdict { error, bound, problem: found, .. } = verdict;
        let problem = problem.or(found);
        let ok = problem.is_none() && error <= bound;
        let shape = if self.skew > 0 { format!("{shape}, askew") } else { shape.to_string() };
        self.report.push(Check { name: name.to_owned(), shape, precision, error, bound, problem, ok });
        // An error of the GPU is reported here, and by all later calls.
        self.stream.synchronize()
    }

    /// All dtypes of activations, with the names of their precisions in reports.
    pub(super) fn types() -> [(DType, &'static str); 3] {
        [Precision::F32, Precision::Bf16, Precision::F16]
            .map(|precision| (precision.storage(), precision.name()))
    }
}
