//! What this machine has, read from the kernel: no NVIDIA library is opened for it.

use std::fs;

use crate::plan::Machine;

/// Where the NVIDIA driver lists its GPUs.
const GPUS: &str = "/proc/driver/nvidia/gpus";

impl Machine {
    /// The machine as it is, narrowed by `CUDA_VISIBLE_DEVICES` as the CUDA runtime would.
    pub fn detect() -> Self {
        let present = fs::read_dir(GPUS).map_or(0, Iterator::count);
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        Machine { gpus: visible_gpus(present, visible.as_deref()) }
    }
}

/// Names of the GPUs a program may use. The list ends at the first entry that names none.
fn visible_gpus(present: usize, visible: Option<&str>) -> Vec<String> {
    let Some(visible) = visible else { return (0..present).map(|gpu| gpu.to_string()).collect() };
    let names = visible.split(',').map(str::trim);
    let known = |name: &&str| match name.parse::<i64>() {
        Ok(index) => (0..present as i64).contains(&index),
        Err(_) => !name.is_empty() && present > 0,
    };
    names.take_while(known).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::visible_gpus;

    #[test]
    fn visibility_narrows() {
        assert_eq!(visible_gpus(2, None), ["0", "1"]);
        assert_eq!(visible_gpus(4, Some("3,1")), ["3", "1"]);
        assert_eq!(visible_gpus(4, Some("2,-1,0")), ["2"]);
        assert_eq!(visible_gpus(1, Some("GPU-ab12")), ["GPU-ab12"]);
        assert!(visible_gpus(4, Some("")).is_empty());
        assert!(visible_gpus(0, Some("0")).is_empty());
    }
}
