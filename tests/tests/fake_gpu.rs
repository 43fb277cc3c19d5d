//! The fakes that let the GPU path run without a GPU: they are what they pretend to be, and notice mistakes.

use mgpu_tests::fake_gpu;

#[test]
fn the_object_is_built_and_has_every_name() {
    let folder = fake_gpu::folder();
    for name in ["libcuda.so.1", "libnvrtc.so.13", "libnccl.so.2", "libcudnn.so.9", "libcublasLt.so.13"] {
        assert!(folder.join(name).exists(), "{name}");
    }
}
