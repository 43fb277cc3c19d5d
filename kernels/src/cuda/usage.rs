//! The resources that a kernel uses, as reported by the assembler.

/// Registers and memory of one compiled kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Bytes of a thread's local memory: arrays with indices unknown at compile time, and spilled registers.
    pub stack: u32,
    /// Bytes of spill stores and loads, because there are too few registers. Spills cost time.
    pub spills: u32,
}

/// Parses the output of `--ptxas-options=-v`, a paragraph for each kernel; the result is sorted by name.
pub(super) fn parse(log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            all.push(Usage { kernel, ..Usage::default() });
        } else if let Some(usage) = all.last_mut() {
            // A missing number is zero.
            if line.contains("bytes stack frame") {
                usage.stack = number_before(line, " bytes stack frame");
                usage.spills =
                    number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            } else if line.contains("Used ") {
                usage.registers = number_before(line, " registers");
                usage.shared = number_before(line, " bytes smem");
            }
        }
    }
    all.sort_by(|a, b| a.kernel.cmp(&b.kernel));
    all
}

/// The number before `words`, or 0 if the line does not contain them.
fn number_before(line: &str, words: &str) -> u32 {
    let found = line.split_once(words).and_then(|(rest, _)| rest.rsplit([' ', ',']).next());
    found.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_log_is_parsed() {
        let log = "ptxas info    : 172 bytes gmem\n\
                   ptxas info    : Compiling entry function 'second' for 'sm_90'\n\
                   ptxas info    : Function properties for second\n\
                   ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 124 registers, used 1 barriers, 34816 bytes smem\n\
                   ptxas info    : Compiling entry function 'first' for 'sm_90'\n\
                   ptxas info    : Function properties for first\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 29 registers, used 0 barriers, 384 bytes cmem[0]\n";
        let first = Usage { kernel: "first".into(), registers: 29, ..Usage::default() };
        let second = Usage { kernel: "second".into(), registers: 124, shared: 34816, stack: 16, spills: 20 };
        assert_eq!(parse(log), [first, second]);
        assert_eq!(parse(""), []);
    }
}
