//! The RDMA devices of this host: what makes UCX faster than TCP.

use std::fs;
use std::path::Path;

/// The names of the InfiniBand, RoCE and EFA devices that the kernel knows, such as `mlx5_0`, in order. `root` is the
/// root of the file system.
pub fn rdma_devices(root: &Path) -> Vec<String> {
    let entries = fs::read_dir(root.join("sys/class/infiniband")).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_listed_by_name() {
        let root = tempfile::tempdir().unwrap();
        assert!(rdma_devices(root.path()).is_empty());
        for name in ["mlx5_1", "mlx5_0"] {
            fs::create_dir_all(root.path().join("sys/class/infiniband").join(name)).unwrap();
        }
        assert_eq!(rdma_devices(root.path()), ["mlx5_0", "mlx5_1"]);
    }
}
