//! Writes one checkpoint and may be killed meanwhile: `t-checkpoint FOLDER KEEP STEP RUN`. First waits for the end of
//! its standard input, so that a tracer can attach. `getppid`, which it does not otherwise call, marks the beginning
//! and the end of the traced system calls.

use std::io::{Read, stdin};
use std::path::Path;

use mgpu::checkpoint::Writer;
use mgpu_tests::checkpoints::snapshot;
use nix::unistd::getppid;

fn main() -> mgpu::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, keep, step, run] = &arguments[..] else { panic!("t-checkpoint FOLDER KEEP STEP RUN") };
    let number = |text: &String| text.parse::<u64>().expect("a number");
    let snapshot = snapshot(number(step), number(run));
    stdin().read_to_end(&mut Vec::new()).expect("standard input ends");
    getppid();
    let mut writer = Writer::new(Path::new(folder), number(keep) as usize)?;
    writer.save(snapshot)?;
    writer.finish()?;
    drop(writer);
    getppid();
    Ok(())
}
