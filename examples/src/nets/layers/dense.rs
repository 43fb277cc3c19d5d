//! Fully connected layers, fused with a following activation function.

use mgpu::Result;
use mgpu_kernels::dense::{self, DenseShape};
use mgpu_kernels::tile_engine::Engine;

use super::activation::Rectifier;
use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, Epilogue, ForwardPass, Image, LayerContext, OnCpu, OnGpu,
    Operation, SetUp, StageTensors, Step, Transposed, conv,
};
use crate::nets::tensors::{Role, Tensors};

/// Fully connected, with a bias for each output.
pub(super) struct Dense {
    pub(super) outputs: usize,
}

impl Definition for Dense {
    fn output(&self, _: [usize; 3]) -> [usize; 3] {
        [self.outputs, 1, 1]
    }

    fn plan(&self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        let (outputs, [inputs, height, width]) = (self.outputs, context.extents);
        assert_eq!((height, width), (1, 1), "layer {}: a dense layer needs a flattened input", context.layer);
        let role = Role::Weight { fan_in: inputs, rectified: context.rectified };
        let weight = tensors.add_pair(context.layer, &[outputs, inputs], role, Role::Bias);
        Some(Box::new(DenseOp { shape: DenseShape { inputs, outputs }, weight, slope: None }))
    }
}

/// A dense layer in its network, with the `slope` of the fused rectifier.
#[derive(Debug, Clone, Copy)]
struct DenseOp {
    shape: DenseShape,
    weight: usize,
    slope: Option<f32>,
}

impl Operation for DenseOp {
    fn describe(&self) -> String {
        let DenseShape { inputs, outputs } = self.shape;
        let slope = self.slope.map_or(String::new(), |slope| format!(", {}", Rectifier { slope }.name()));
        format!("dense {outputs} of {inputs}{slope}")
    }

    fn multiply_adds(&self) -> usize {
        self.shape.inputs * self.shape.outputs
    }

    fn weight(&self) -> Option<usize> {
        Some(self.weight)
    }

    fn takes_vectors(&self) -> bool {
        true
    }

    fn fuse(&mut self, epilogue: Epilogue) -> bool {
        match epilogue {
            Epilogue::Rectifier { slope } if self.slope.is_none() => self.slope = Some(slope),
            _ => return false,
        }
        true
    }

    fn transposed(&self, flattened: Option<Image>) -> Option<Transposed> {
        flattened.map(|Image { channels, plane }| Transposed { outer: self.shape.outputs, channels, plane })
    }

    fn on_cpu(&self, kernels: CpuKernels) -> CpuLayer {
        let &DenseOp { shape, weight, slope } = self;
        let kernel = dense::cpu::Dense::new(shape, slope).with_engine(kernels.engine);
        CpuLayer::Dense(Cpu { outputs: shape.outputs, weight, kernel })
    }

    fn on_gpu(&self, set_up: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        let shape = dense::cuda::convolution(&self.shape);
        Ok(Box::new(conv::Gpu::new(set_up, shape, self.weight, self.slope, None)?))
    }
}

/// On the CPU.
#[derive(Debug)]
pub(in crate::nets) struct Cpu {
    outputs: usize,
    weight: usize,
    kernel: dense::cpu::Dense,
}

impl Cpu {
    /// What computes products of bf16, if that was chosen.
    pub(super) fn engine(&self) -> Option<Engine> {
        self.kernel.engine()
    }
}

impl OnCpu<f32> for Cpu {
    fn forward(&mut self, step: Step<'_>, x: &[f32], y: &mut [f32], _: &mut ForwardPass<'_>) -> Result<()> {
        let (weights, bias) = (step.tensor(self.weight), step.tensor(self.weight + 1));
        self.kernel.forward(step.threads, step.scratch, x, weights, bias, y);
        Ok(())
    }

    fn backward(
        &mut self,
        mut step: Step<'_>,
        tensors: StageTensors<'_, f32>,
        pass: BackwardPass<'_>,
    ) -> Result<()> {
        let Cpu { outputs, weight, kernel } = self;
        let (StageTensors { x, y, dy, dx }, BackwardPass { sink, bias, .. }) = (tensors, pass);
        let from = dense::cpu::Backward { x, weights: step.tensor(*weight), y, dy };
        let db = &mut bias[..*outputs];
        kernel.backward(step.threads, step.scratch, from, sink.gradient(*weight), db, dx);
        step.announce(sink, *weight, db)
    }
}
