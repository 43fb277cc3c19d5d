//! Dense layers by cuBLASLt, if it is installed.
//!
//! The library's matrices are column-major. A row-major matrix, read as a column-major one, is its transpose; so the
//! layer's products become the following, all of matrices as they are in memory:
//!
//! | pass | rows | here | in columns |
//! |---|---|---|---|
//! | forward | y \[N, O\] = x · wᵀ | O × N | wᵀ (transposed) · x |
//! | backward input | dx \[N, I\] = dy · w | I × N | w · dy |
//! | backward weights | dw \[O, I\] = dyᵀ · x | I × O | x · dyᵀ (transposed) |
//!
//! where `w` is I × O, `x` I × N and `dy` O × N in columns.
//!
//! - *Precision*: f32 uses the compute type that is f32 throughout, TF32 the one that permits TF32; products of
//!   bfloat16 operands are summed in f32, and the gradient of the weights is written in f32.
//! - *Bias and activation* are an epilogue of the forward product, if the library has it: it has none and ReLU. Its
//!   ReLU is known to turn NaN into zero, and is then rejected by autotuning. With bfloat16 the library documents a
//!   bias in bfloat16, but this crate's is f32; f32 is requested all the same, and if the library declines, the
//!   caller adds the bias.
//! - *Determinism*: a sum that is split over blocks is either completed by a second step, in f32, in the workspace,
//!   or not split. The schemes that add in place are masked out.
//!
//! The library's heuristics propose algorithms, the best few of which are benchmarked. An algorithm is 64 opaque
//! bytes that the same version of the library accepts again: so it is cached, and checked before it is used.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
    cublasLtMatmulDescAttributes_t as Property, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtReductionScheme_t as Reduction, cudaDataType_t as DataType,
};

use super::ConvShape;
use super::library_layer::{LibraryLayer, Operands};
use crate::Precision;
use crate::cuda::algorithm::{Form, LibraryAlgorithm};
use crate::cuda::autotune::{Note, Pass, WORKSPACE_LIMIT};
use crate::cuda::trial::Candidate;
use crate::cuda::{Device, Error, Result, Stream, libraries};

/// An opaque object of the library.
type Raw = *mut c_void;
/// An integer and not an enum, since a newer library may have more codes.
type Status = u32;
/// Device memory, or a number on the host.
type Address = *const c_void;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

libraries::functions! {
    /// The functions of cuBLASLt that are used.
    Functions {
        version = cublasLtGetVersion() -> usize;
        status_string = cublasLtGetStatusString(Status) -> *const c_char;
        create = cublasLtCreate(*mut Raw) -> Status;
        create_product = cublasLtMatmulDescCreate(*mut Raw, Compute, DataType) -> Status;
        set_product = cublasLtMatmulDescSetAttribute(Raw, Property, Address, usize) -> Status;
        destroy_product = cublasLtMatmulDescDestroy(Raw) -> Status;
        create_layout = cublasLtMatrixLayoutCreate(*mut Raw, DataType, u64, u64, i64) -> Status;
        destroy_layout = cublasLtMatrixLayoutDestroy(Raw) -> Status;
        create_preference = cublasLtMatmulPreferenceCreate(*mut Raw) -> Status;
        set_preference = cublasLtMatmulPreferenceSetAttribute(Raw, Preference, Address, usize) -> Status;
        destroy_preference = cublasLtMatmulPreferenceDestroy(Raw) -> Status;
        propose = cublasLtMatmulAlgoGetHeuristic(
            Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut HeuristicResult, *mut c_int
        ) -> Status;
        check_algorithm = cublasLtMatmulAlgoCheck(Raw, Raw, Raw, Raw, Raw, Raw, *const [u64; 8], *mut HeuristicResult) -> Status;
        multiply = cublasLtMatmul(
            Raw, Raw, Address, Address, Raw, Address, Raw, Address, Address, Raw, *mut c_void, Raw,
            *const [u64; 8], *mut c_void, usize, Raw
        ) -> Status;
    }
}

/// The library's handle for one GPU, shared by all layers.
struct Handle {
    functions: Functions,
    device: Arc<Device>,
    raw: Raw,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// The handle for this GPU, created by the first call.
    ///
    /// # Errors
    /// If the library is not found, lacks a function, or refuses this GPU.
    fn for_device(device: &Arc<Device>) -> Result<Arc<Self>> {
        // Kept until the end of the process: captured graphs may use resources of the handle.
        static OPEN: Mutex<Vec<Arc<Handle>>> = Mutex::new(Vec::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.iter().find(|known| Arc::ptr_eq(&known.device, device)) {
            return Ok(Arc::clone(known));
        }
        let functions = Functions::from_library(&libraries::OpenLibrary::open(&libraries::CUBLAS_LT)?)?;
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        let status = unsafe { (functions.create)(&mut raw) };
        functions.check("cublasLtCreate", status)?;
        let open_handle = Arc::new(Handle { functions, device: Arc::clone(device), raw });
        open.push(Arc::clone(&open_handle));
        Ok(open_handle)
    }
}

impl Functions {
    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function accepts any number and returns a constant string.
        let text = unsafe { (self.status_string)(status) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a constant string of the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::Library { call, text: format!("{text} ({status})") })
    }
}

/// The layout of a matrix, or the description of a product.
struct Descriptor {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> Status,
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by the library, which reads descriptors only during a call.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// Maximum number of algorithms of a pass that are benchmarked, with and without the epilogue each.
const MAX_CANDIDATES: usize = 4;
/// The addresses of all operands are multiples of this. As an address it stands for a bias when algorithms are
/// requested: the library uses it for its alignment only.
const ALIGNMENT: u32 = 16;

/// One layer, described to the library.
pub(super) struct MatmulPlan {
    handle: Arc<Handle>,
    slope: f32,
    /// I × N, O × N and I × O in the type of activations, and I × O in f32.
    x: Descriptor,
    y: Descriptor,
    w: Descriptor,
    dw: Descriptor,
    forward: Descriptor,
    /// Locked, because it contains the address of the bias.
    forward_fused: Mutex<Descriptor>,
    backward_input: Descriptor,
    backward_weights: Descriptor,
}

// SAFETY: descriptors are only read after they are set, except for the locked one.
unsafe impl Send for MatmulPlan {}
// SAFETY: as above.
unsafe impl Sync for MatmulPlan {}

impl MatmulPlan {
    /// Describes a layer for batches of `samples`, whose activation has `slope` for negative values.
    ///
    /// # Errors
    /// If the library is not found, or refuses the description.
    pub(super) fn new(
        device: &Arc<Device>,
        shape: &ConvShape,
        samples: usize,
        precision: Precision,
        slope: f32,
    ) -> Result<Self> {
        let handle = Handle::for_device(device)?;
        let f = &handle.functions;
        let (storage, compute) = match precision {
            Precision::F32 => (DataType::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F),
            Precision::Tf32 => (DataType::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F_FAST_TF32),
            Precision::Bf16 => (DataType::CUDA_R_16BF, Compute::CUBLAS_COMPUTE_32F),
            Precision::F16 => (DataType::CUDA_R_16F, Compute::CUBLAS_COMPUTE_32F),
        };
        let layout = |data, rows: usize, columns: usize| -> Result<Descriptor> {
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` is writable.
            let status =
                unsafe { (f.create_layout)(&mut raw, data, rows as u64, columns as u64, rows as i64) };
            f.check("cublasLtMatrixLayoutCreate", status)?;
            Ok(Descriptor { raw, destroy: f.destroy_layout })
        };
        let product = |properties: &[(Property, u32)]| -> Result<Descriptor> {
            let mut raw = std::ptr::null_mut();
            // SAFETY: `raw` is writable.
            let status = unsafe { (f.create_product)(&mut raw, compute, DataType::CUDA_R_32F) };
            f.check("cublasLtMatmulDescCreate", status)?;
            let product = Descriptor { raw, destroy: f.destroy_product };
            for (property, value) in properties {
                // SAFETY: these properties are integers of four bytes.
                let status = unsafe { (f.set_product)(raw, *property, (&raw const *value).cast(), 4) };
                f.check("cublasLtMatmulDescSetAttribute", status)?;
            }
            Ok(product)
        };
        // The value of CUBLAS_OP_T, which is defined in a header of cuBLAS.
        let transposed = 1;
        let (turn_a, turn_b) = (
            (Property::CUBLASLT_MATMUL_DESC_TRANSA, transposed),
            (Property::CUBLASLT_MATMUL_DESC_TRANSB, transposed),
        );
        let epilogue = match slope {
            0.0 => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
            _ => Epilogue::CUBLASLT_EPILOGUE_BIAS,
        };
        let fused = [
            turn_a,
            (Property::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32),
            (Property::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, DataType::CUDA_R_32F as u32),
        ];
        let ConvShape { channels: inputs, filters: outputs, .. } = *shape;
        Ok(MatmulPlan {
            slope,
            x: layout(storage, inputs, samples)?,
            y: layout(storage, outputs, samples)?,
            w: layout(storage, inputs, outputs)?,
            dw: layout(DataType::CUDA_R_32F, inputs, outputs)?,
            forward: product(&[turn_a])?,
            // If the type of the bias equals that of the output, it is not set: older versions do not have this
            // property.
            forward_fused: Mutex::new(product(&fused[..if precision.is_half() { 3 } else { 2 }])?),
            backward_input: product(&[])?,
            backward_weights: product(&[turn_b])?,
            handle,
        })
    }

    /// Layouts of both operands and of the result.
    fn layouts(&self, pass: Pass) -> [Raw; 3] {
        let (a, b, d) = match pass {
            Pass::Forward => (&self.w, &self.x, &self.y),
            Pass::BackwardInput => (&self.w, &self.y, &self.x),
            Pass::BackwardWeights => (&self.x, &self.y, &self.dw),
        };
        [a.raw, b.raw, d.raw]
    }

    /// Calls `with` with the description of the product. `bias` is the address of the bias that a fused product adds.
    fn with_product<T>(
        &self,
        pass: Pass,
        form: Form,
        bias: u64,
        with: impl FnOnce(Raw) -> Result<T>,
    ) -> Result<T> {
        if form == Form::Fused {
            let f = &self.handle.functions;
            let product = self.forward_fused.lock().unwrap_or_else(PoisonError::into_inner);
            let property = Property::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            // SAFETY: this property is an address.
            let status = unsafe {
                (f.set_product)(product.raw, property, (&raw const bias).cast(), size_of_val(&bias))
            };
            f.check("cublasLtMatmulDescSetAttribute", status)?;
            return with(product.raw);
        }
        with(match pass {
            Pass::Forward => self.forward.raw,
            Pass::BackwardInput => self.backward_input.raw,
            Pass::BackwardWeights => self.backward_weights.raw,
        })
    }

    /// The algorithms that the library's heuristics propose, best first.
    fn propose(&self, pass: Pass, form: Form, deterministic: bool) -> Result<Vec<Candidate>> {
        let f = &self.handle.functions;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        let status = unsafe { (f.create_preference)(&mut raw) };
        f.check("cublasLtMatmulPreferenceCreate", status)?;
        let preference = Descriptor { raw, destroy: f.destroy_preference };
        let set = |property, value: Address, size| {
            // SAFETY: `size` is the size of the property.
            let status = unsafe { (f.set_preference)(preference.raw, property, value, size) };
            f.check("cublasLtMatmulPreferenceSetAttribute", status)
        };
        let (limit, alignment) = (WORKSPACE_LIMIT as u64, ALIGNMENT);
        set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const limit).cast(), 8)?;
        for property in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            set(property, (&raw const alignment).cast(), 4)?;
        }
        if deterministic {
            let schemes = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const schemes).cast(), 4)?;
        }
        let [a, b, d] = self.layouts(pass);
        let mut found = [HeuristicResult::default(); 16];
        let mut count: c_int = 0;
        self.with_product(pass, form, ALIGNMENT.into(), |product| {
            // SAFETY: descriptors of this layer, and room for the requested number of results.
            let status = unsafe {
                (f.propose)(
                    self.handle.raw,
                    product,
                    a,
                    b,
                    d,
                    d,
                    preference.raw,
                    found.len() as c_int,
                    found.as_mut_ptr(),
                    &mut count,
                )
            };
            f.check("cublasLtMatmulAlgoGetHeuristic", status)
        })?;
        let found = found.iter().take(count.max(0) as usize);
        Ok(found
            .filter(|result| result.status == 0 && result.workspace <= WORKSPACE_LIMIT)
            .map(|result| Candidate {
                algorithm: LibraryAlgorithm::cublaslt(result.algorithm, form),
                workspace: result.workspace,
            })
            .collect())
    }
}

impl LibraryLayer for MatmulPlan {
    fn version(&self) -> String {
        // SAFETY: the function has no arguments.
        format!("cuBLASLt {}", unsafe { (self.handle.functions.version)() })
    }

    fn candidates(&self, pass: Pass, deterministic: bool, _limit: usize) -> (Vec<Candidate>, Vec<Note>) {
        let (mut candidates, mut notes) = (Vec::new(), Vec::new());
        for (form, name) in [(Form::Fused, "cuBLASLt fused"), (Form::Plain, "cuBLASLt")] {
            let possible = pass == Pass::Forward && (self.slope == 0.0 || self.slope == 1.0);
            if form == Form::Fused && !possible {
                continue;
            }
            match self.propose(pass, form, deterministic) {
                Ok(found) => candidates.extend(found.into_iter().take(MAX_CANDIDATES)),
                Err(error) => notes.push(Note::new(name, error)),
            }
        }
        (candidates, notes)
    }

    fn workspace(&self, pass: Pass, algorithm: &LibraryAlgorithm) -> Result<usize> {
        let f = &self.handle.functions;
        let [a, b, d] = self.layouts(pass);
        let mut result = HeuristicResult::default();
        self.with_product(pass, algorithm.form, ALIGNMENT.into(), |product| {
            // SAFETY: descriptors of this layer, and a writable result.
            let status = unsafe {
                (f.check_algorithm)(self.handle.raw, product, a, b, d, d, &algorithm.id, &mut result)
            };
            f.check("cublasLtMatmulAlgoCheck", status)?;
            f.check("cublasLtMatmulAlgoCheck", result.status)
        })?;
        Ok(result.workspace)
    }

    fn run(&self, stream: &Stream, algorithm: &LibraryAlgorithm, operands: &Operands<'_>) -> Result<()> {
        let Operands { pass, factors: [from, by], result: to, bias, workspace } = *operands;
        let f = &self.handle.functions;
        let [a_layout, b_layout, to_layout] = self.layouts(pass);
        // The library's products have the weights first, see the table above.
        let (a, b) = if pass == Pass::Forward { (by, from) } else { (from, by) };
        let (one, zero) = (1.0f32, 0.0f32);
        let bias = bias.map_or(0, |bias| bias.address());
        self.with_product(pass, algorithm.form, bias, |product| {
            // SAFETY: the layouts fit the memory; the result is also passed as the addend, which is multiplied by
            // zero; the factors are read during the call.
            let status = unsafe {
                (f.multiply)(
                    self.handle.raw,
                    product,
                    (&raw const one).cast(),
                    a.address() as Address,
                    a_layout,
                    b.address() as Address,
                    b_layout,
                    (&raw const zero).cast(),
                    to.address() as Address,
                    to_layout,
                    to.address() as *mut c_void,
                    to_layout,
                    &algorithm.id,
                    workspace.address() as *mut c_void,
                    workspace.bytes(),
                    stream.raw().cast(),
                )
            };
            f.check("cublasLtMatmul", status)
        })
    }
}
