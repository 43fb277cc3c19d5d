//! From CUDA C++ to an image for one GPU, at run time.
//!
//! NVRTC compiles for exactly the architecture at hand and gives a *cubin*, which the driver loads as it is. So a driver
//! for CUDA 13.0 takes what any 13.x compiler made; only an architecture that the compiler does not know yet falls back
//! to its newest virtual one (*PTX*), which the driver then translates.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{result, sys};

use super::error::{Error, Result};
use super::usage::{self, Usage};
use super::{cache, libraries};

/// What every source begins with.
pub const PRELUDE: &str = include_str!("device.cuh");

/// The compute capabilities that kernels are made for, from Turing to Blackwell: those that differ in what a compiler
/// makes of a kernel. GPUs between them run what it makes for them as well.
pub const ARCHITECTURES: [(u32, u32); 7] = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

/// CUDA C++ of one operation.
#[derive(Debug)]
pub struct Source {
    /// The operation.
    pub name: &'static str,
    /// The text, without the [`PRELUDE`].
    pub text: &'static str,
}

impl Source {
    /// The text that is compiled.
    pub fn whole(&self) -> String {
        // So that the compiler counts lines as an editor does.
        format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", self.name, self.text)
    }
}

/// Options besides the architecture. Contraction to fused multiply-adds is on, as it is by default; fast division, roots
/// and denormals are not.
const OPTIONS: [&str; 2] = ["--std=c++17", "--extra-device-vectorization"];

/// The image of `source` for an architecture: from the cache, or compiled now. `driver` is the newest CUDA version that the
/// driver understands.
///
/// # Errors
/// If there is no compiler, or the source does not compile.
pub(super) fn image(
    source: &'static Source,
    architecture: (u32, u32),
    driver: (u32, u32),
) -> Result<Vec<u8>> {
    let text = source.whole();
    let (major, minor) = architecture;
    // Not by the compiler's version: what an older one made does as well, and with all kernels in the cache the library,
    // of a hundred megabytes, need not be opened, nor be there.
    let key = cache::key(&[&text, &OPTIONS.join(" "), &format!("{major}.{minor}")]);
    if let Some(image) = cache::read(source.name, &key) {
        return Ok(image);
    }
    let (image, _) = Compiler::open()?.compile(source.name, &text, architecture, driver, &[])?;
    cache::write(source.name, &key, &image);
    Ok(image)
}

/// A source compiled for one architecture.
#[derive(Debug)]
pub struct Compiled {
    /// The cubin, as the driver loads it.
    pub image: Vec<u8>,
    /// What the compiler and the assembler have to say.
    pub log: String,
}

impl Compiled {
    /// Registers and memory of every kernel, by name. Empty if the compiler does not tell.
    pub fn usage(&self) -> Vec<Usage> {
        usage::parse(&self.log)
    }
}

/// Compiles `source` for an architecture such as (9, 0). That needs no GPU, and passes the cache by.
///
/// # Errors
/// If there is no compiler, it does not know the architecture, or the source does not compile.
pub fn compile_for(source: &'static Source, architecture: (u32, u32)) -> Result<Compiled> {
    let compiler = Compiler::open()?;
    let (image, log) =
        compiler.compile(source.name, &source.whole(), architecture, (0, 0), &["--ptxas-options=-v"])?;
    Ok(Compiled { image, log })
}

/// Version of the compiler that is found, major and minor.
///
/// # Errors
/// If there is none.
pub fn compiler_version() -> Result<(u32, u32)> {
    Ok(Compiler::open()?.version)
}

/// NVRTC, opened.
struct Compiler {
    version: (u32, u32),
}

/// A program that is destroyed at the end.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create_program`, destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

impl Compiler {
    fn open() -> Result<Self> {
        libraries::open(&libraries::NVRTC)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two writable integers.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| refused("nvrtcVersion", error))?;
        Ok(Compiler { version: (major as u32, minor as u32) })
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
        let known = architectures()?;
        let (major, minor) = architecture;
        let exact = major * 10 + minor;
        let target = if known.contains(&exact) {
            format!("sm_{exact}")
        } else {
            let newest = known.iter().copied().filter(|known| *known < exact).max();
            let Some(newest) = newest.filter(|_| self.version <= driver) else {
                return Err(Error::Missing(format!(
                    "the kernel compiler libnvrtc {}.{} knows no GPU of compute capability {major}.{minor}, and the driver is for CUDA {}.{}: install an NVRTC that knows it, or a newer driver",
                    self.version.0, self.version.1, driver.0, driver.1
                )));
            };
            format!("compute_{newest}")
        };
        let source = CString::new(text).expect("sources have no zero bytes");
        let file = CString::new(format!("{name}.cu")).expect("names have no zero bytes");
        let program = result::create_program(&source, Some(&file))
            .map_err(|error| refused("nvrtcCreateProgram", error))?;
        let program = Program(program);
        let mut options: Vec<String> = OPTIONS.map(str::to_owned).to_vec();
        options.push(format!("--gpu-architecture={target}"));
        options.extend(more_options.iter().map(ToString::to_string));
        // SAFETY: the program was created above and is alive.
        let outcome = unsafe { result::compile_program(program.0, &options) };
        // SAFETY: as above.
        let log = text_of(&unsafe { result::get_program_log(program.0) }.unwrap_or_default());
        if outcome.is_err() {
            return Err(Error::Compile { kernels: name, architecture: target, log });
        }
        if target.starts_with("compute") {
            // SAFETY: as above.
            let ptx = unsafe { result::get_ptx(program.0) }.map_err(|error| refused("nvrtcGetPTX", error))?;
            return Ok((ptx.into_iter().map(|byte| byte as u8).collect(), log));
        }
        let mut size = 0;
        // SAFETY: as above; `size` is writable.
        unsafe { sys::nvrtcGetCUBINSize(program.0, &mut size) }
            .result()
            .map_err(|error| refused("nvrtcGetCUBINSize", error))?;
        let mut image = vec![0u8; size];
        // SAFETY: as above; the image has as many bytes as the library said.
        unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) }
            .result()
            .map_err(|error| refused("nvrtcGetCUBIN", error))?;
        Ok((image, log))
    }
}

/// The architectures that the compiler makes cubins for, as 90 for 9.0.
fn architectures() -> Result<Vec<u32>> {
    let mut count = 0;
    // SAFETY: a writable integer.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }
        .result()
        .map_err(|error| refused("nvrtcGetNumSupportedArchs", error))?;
    let mut known = vec![0; count.max(0) as usize];
    // SAFETY: room for as many as the library said.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }
        .result()
        .map_err(|error| refused("nvrtcGetSupportedArchs", error))?;
    Ok(known.into_iter().map(|known| known as u32).collect())
}

fn refused(call: &'static str, error: NvrtcError) -> Error {
    Error::Library { call, text: error.to_string() }
}

/// The text up to its zero byte.
fn text_of(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).collect();
    let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into_owned()).trim().to_owned()
}
