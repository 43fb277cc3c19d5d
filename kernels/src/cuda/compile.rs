//! Compiles CUDA C++ for one GPU at run time.
//!
//! NVRTC compiles for exactly the architecture at hand and returns a *cubin*, which the driver loads without
//! translation. So a driver for CUDA 13.0 loads the output of any 13.x compiler, and one for 12.x that of any 12.x
//! compiler. Only for an architecture that the compiler does not know yet does it fall back to the newest virtual
//! architecture (*PTX*), which the driver then translates.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use super::error::{Error, Result};
use super::usage::{self, Usage};
use super::{cache, libraries};

/// The text that every source begins with.
pub const PRELUDE: &str = include_str!("device.cuh");

/// The compute capabilities from Turing to Blackwell for which compilers generate different code. Tests compile all
/// kernels for them; at run time a kernel is compiled for the capability of the GPU at hand.
pub const ARCHITECTURES: [(u32, u32); 7] = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

/// The CUDA C++ source of one operation.
#[derive(Debug)]
pub struct Source {
    /// The operation.
    pub name: &'static str,
    /// The text, without the [`PRELUDE`].
    pub text: &'static str,
}

/// The source of kernels in `NAME.cu`, after the headers that it needs.
macro_rules! kernel_source {
    ($name:literal: $($header:literal),*) => {
        crate::cuda::Source {
            name: $name,
            text: concat!(
                $("#line 1 \"", $header, "\"\n", include_str!($header),)*
                "#line 1 \"", $name, ".cu\"\n", include_str!(concat!($name, ".cu"))
            ),
        }
    };
}
pub(crate) use kernel_source;

impl Source {
    /// The text that is compiled, for all kernels.
    pub fn whole(&self) -> String {
        self.after_prelude(self.text)
    }

    fn after_prelude(&self, text: &str) -> String {
        // `#line` makes the compiler count lines from the beginning of the file.
        format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{text}", self.name)
    }
}

/// Options besides the architecture. Contraction to fused multiply-adds is on, which is the default; fast division,
/// square roots and denormals are off.
const OPTIONS: [&str; 2] = ["--std=c++17", "--extra-device-vectorization"];

/// The compiled image of one kernel for one architecture, cached or not yet compiled. A network uses few of the kernels of
/// a source, and all of them would take up to half a minute to compile.
pub(super) struct Image<'a> {
    source: &'static Source,
    kernel: &'a str,
    text: String,
    architecture: (u32, u32),
    /// The newest CUDA version that the driver understands.
    driver: (u32, u32),
    key: String,
}

impl<'a> Image<'a> {
    pub(super) fn new(
        source: &'static Source,
        kernel: &'a str,
        architecture: (u32, u32),
        driver: (u32, u32),
    ) -> Self {
        let text = source.after_prelude(&source.text_of(kernel));
        let machine = format!("{architecture:?} {}", driver.0);
        // The compiler's version is not part of the key: the output of an older one is equally good, and if all
        // kernels are in the cache, the library (a hundred megabytes) need not be opened or even installed.
        let key = cache::key(&[&text, &OPTIONS.join(" "), &machine]);
        Image { source, kernel, text, architecture, driver, key }
    }

    /// The cached image.
    pub(super) fn cached(&self) -> Option<Vec<u8>> {
        cache::read(self.kernel, &self.key)
    }

    /// # Errors
    /// If there is no compiler, or the source does not compile.
    pub(super) fn compile(&self) -> Result<Vec<u8>> {
        let compiler = Compiler::open(self.driver)?;
        let (image, _) =
            compiler.compile(self.source.name, &self.text, self.architecture, self.driver, &[])?;
        Ok(image)
    }

    /// Caches the output of [`compile`](Self::compile), after it has been loaded successfully.
    pub(super) fn store(&self, image: &[u8]) {
        cache::write(self.kernel, &self.key, image);
    }
}

/// A source compiled for one architecture.
#[derive(Debug)]
pub struct Compiled {
    /// The cubin that the driver loads.
    pub image: Vec<u8>,
    /// The output of the compiler and the assembler.
    pub log: String,
}

impl Compiled {
    /// Registers and memory of every kernel, by name. Empty if the compiler does not report them.
    pub fn usage(&self) -> Vec<Usage> {
        usage::parse(&self.log)
    }
}

/// Compiles `source` for an architecture such as (9, 0). Needs no GPU, and does not use the cache.
///
/// # Errors
/// If there is no compiler, it does not know the architecture, or the source does not compile.
pub fn compile_for(source: &'static Source, architecture: (u32, u32)) -> Result<Compiled> {
    let compiler = Compiler::open((0, 0))?;
    let (image, log) =
        compiler.compile(source.name, &source.whole(), architecture, (0, 0), &["--ptxas-options=-v"])?;
    Ok(Compiled { image, log })
}

/// Version of the compiler that is found, major and minor.
///
/// # Errors
/// If there is none.
pub fn compiler_version() -> Result<(u32, u32)> {
    Ok(Compiler::open((0, 0))?.version)
}

/// NVRTC, opened.
struct Compiler {
    functions: Functions,
    version: (u32, u32),
}

/// `nvrtcProgram`.
type ProgramHandle = *mut c_void;
/// `nvrtcResult`; 0 is success.
type Status = c_int;

libraries::functions! {
    /// The functions of NVRTC that are used.
    Functions {
        version = nvrtcVersion(*mut c_int, *mut c_int) -> Status;
        error_string = nvrtcGetErrorString(Status) -> *const c_char;
        architectures_len = nvrtcGetNumSupportedArchs(*mut c_int) -> Status;
        architectures = nvrtcGetSupportedArchs(*mut c_int) -> Status;
        create = nvrtcCreateProgram(*mut ProgramHandle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
        destroy = nvrtcDestroyProgram(*mut ProgramHandle) -> Status;
        compile = nvrtcCompileProgram(ProgramHandle, c_int, *const *const c_char) -> Status;
        log_len = nvrtcGetProgramLogSize(ProgramHandle, *mut usize) -> Status;
        log = nvrtcGetProgramLog(ProgramHandle, *mut c_char) -> Status;
        ptx_len = nvrtcGetPTXSize(ProgramHandle, *mut usize) -> Status;
        ptx = nvrtcGetPTX(ProgramHandle, *mut c_char) -> Status;
        cubin_len = nvrtcGetCUBINSize(ProgramHandle, *mut usize) -> Status;
        cubin = nvrtcGetCUBIN(ProgramHandle, *mut c_char) -> Status;
    }
}

/// A program, destroyed when dropped.
struct Program<'a> {
    compiler: &'a Compiler,
    handle: ProgramHandle,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `compile`, destroyed once.
        unsafe { (self.compiler.functions.destroy)(&mut self.handle) };
    }
}

/// The functions that return the length of an output, and the output itself.
type Len = unsafe extern "C" fn(ProgramHandle, *mut usize) -> Status;
type Get = unsafe extern "C" fn(ProgramHandle, *mut c_char) -> Status;

impl Program<'_> {
    /// The output that `get` writes; `len` returns its length.
    fn output(&self, call: &'static str, len: Len, get: Get) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive, `size` is writable.
        self.compiler.check(call, unsafe { len(self.handle, &mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: as above; there is room for the number of bytes that the library returned.
        self.compiler.check(call, unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Compiler {
    /// Opens the compiler for a driver of CUDA version `driver`; any compiler for (0, 0).
    fn open(driver: (u32, u32)) -> Result<Self> {
        let library = if driver.0 == 12 { &libraries::NVRTC_12 } else { &libraries::NVRTC };
        let mut compiler = Compiler {
            functions: Functions::from_library(&libraries::OpenLibrary::open(library)?)?,
            version: (0, 0),
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two writable integers.
        let status = unsafe { (compiler.functions.version)(&mut major, &mut minor) };
        compiler.check("nvrtcVersion", status)?;
        compiler.version = (major as u32, minor as u32);
        if driver != (0, 0) && compiler.version.0 > driver.0 {
            return Err(Error::Missing(format!(
                "the kernel compiler libnvrtc {major}.{minor} is for drivers of CUDA {major}, but this driver is for {}.{}: {}",
                driver.0,
                driver.1,
                libraries::NVRTC_12.install
            )));
        }
        Ok(compiler)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function accepts every number.
        let text = unsafe { (self.functions.error_string)(status) };
        let text = if text.is_null() {
            format!("error {status}")
        } else {
            // SAFETY: not null, so one of the constants of the library, which is never closed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Error::Library { call, text })
    }

    /// The image and the compiler's log.
    fn compile(
        &self,
        name: &'static str,
        text: &str,
        architecture: (u32, u32),
        driver: (u32, u32),
        more_options: &[&str],
    ) -> Result<(Vec<u8>, String)> {
        let target = self.target(architecture, driver)?;
        let c_string = |text: String| CString::new(text).expect("sources and names have no zero bytes");
        let (source, file) = (c_string(text.to_owned()), c_string(format!("{name}.cu")));
        let mut program = Program { compiler: self, handle: null_mut() };
        let (functions, none) = (&self.functions, null());
        // SAFETY: two strings that live until the program has been created, which copies them, and no headers.
        let status =
            unsafe { (functions.create)(&mut program.handle, source.as_ptr(), file.as_ptr(), 0, none, none) };
        self.check("nvrtcCreateProgram", status)?;
        let architecture = format!("--gpu-architecture={target}");
        let options = OPTIONS.iter().copied().chain([&architecture[..]]).chain(more_options.iter().copied());
        let options: Vec<CString> = options.map(|option| c_string(option.to_owned())).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is alive, and the number of options is right.
        let status =
            unsafe { (functions.compile)(program.handle, pointers.len() as c_int, pointers.as_ptr()) };
        let log = program.output("nvrtcGetProgramLog", functions.log_len, functions.log)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if status != 0 {
            return Err(Error::Compile { kernels: name, architecture: target, log });
        }
        let image = if target.starts_with("compute") {
            program.output("nvrtcGetPTX", functions.ptx_len, functions.ptx)?
        } else {
            program.output("nvrtcGetCUBIN", functions.cubin_len, functions.cubin)?
        };
        Ok((image, log))
    }

    /// The architecture to compile for: the GPU's own, or the newest virtual one that the compiler knows, if the
    /// driver can translate it.
    fn target(&self, (major, minor): (u32, u32), driver: (u32, u32)) -> Result<String> {
        let known = self.architectures()?;
        let exact = major * 10 + minor;
        if known.contains(&exact) {
            // Instructions for warpgroups exist on this architecture alone, and have a target of their own.
            let own = if exact == 90 { "a" } else { "" };
            return Ok(format!("sm_{exact}{own}"));
        }
        let newest = known.into_iter().filter(|known| *known < exact).max();
        match newest.filter(|_| self.version <= driver) {
            Some(newest) => Ok(format!("compute_{newest}")),
            None => Err(Error::Missing(format!(
                "the kernel compiler libnvrtc {}.{} does not support compute capability {major}.{minor}, and the driver is for CUDA {}.{}: install an NVRTC that supports it, or a newer driver",
                self.version.0, self.version.1, driver.0, driver.1
            ))),
        }
    }

    /// The architectures that the compiler supports, as 90 for 9.0.
    fn architectures(&self) -> Result<Vec<u32>> {
        let mut count = 0;
        // SAFETY: a writable integer.
        let status = unsafe { (self.functions.architectures_len)(&mut count) };
        self.check("nvrtcGetNumSupportedArchs", status)?;
        let mut known = vec![0; count.max(0) as usize];
        // SAFETY: room for as many as the library returned.
        let status = unsafe { (self.functions.architectures)(known.as_mut_ptr()) };
        self.check("nvrtcGetSupportedArchs", status)?;
        Ok(known.into_iter().map(|known| known as u32).collect())
    }
}
