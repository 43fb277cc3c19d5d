//! Writes one checkpoint, to be killed while it does: `t-checkpoint FOLDER KEEP STEP RUN`. It waits for the end of its standard
//! input, so that whoever wants to look at its system calls has the time to get ready; `getppid`, which it has no other use
//! for, marks the first of them and the last.

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
