//! Fully connected layers. They take the activation function behind them along.

use mgpu::Result;
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::dense::{self, DenseShape};

use super::activation::Rectifier;
use super::{
    BackwardPass, Definition, ForwardPass, Image, Machine, OnCpu, OnGpu, Operation, Place, SetUp, Sides,
    Step, Tail, Transposed, conv,
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

    fn plan(&self, tensors: &mut Tensors, place: &Place) -> Option<Box<dyn Operation>> {
        let (outputs, [inputs, height, width]) = (self.outputs, place.extents);
        assert_eq!((height, width), (1, 1), "layer {}: a dense layer needs a flattened input", place.layer);
        let role = Role::Weight { fan_in: inputs, rectified: place.rectified };
        let weight = tensors.add_pair(place.layer, &[outputs, inputs], role, Role::Bias);
        Some(Box::new(Product { shape: DenseShape { inputs, outputs }, weight, slope: None }))
    }
}

/// A dense layer in its network, with the `slope` of the rectifier that it has taken along.
#[derive(Debug, Clone, Copy)]
struct Product {
    shape: DenseShape,
    weight: usize,
    slope: Option<f32>,
}

impl Operation for Product {
    fn describe(&self) -> String {
        let DenseShape { inputs, outputs } = self.shape;
        let slope = self.slope.map_or(String::new(), |slope| format!(", {}", Rectifier { slope }.name()));
        format!("dense {outputs} of {inputs}{slope}")
    }

    fn products(&self) -> usize {
        self.shape.inputs * self.shape.outputs
    }

    fn weight(&self) -> Option<usize> {
        Some(self.weight)
    }

    fn takes_vectors(&self) -> bool {
        true
    }

    fn take_along(&mut self, tail: Tail) -> bool {
        match tail {
            Tail::Rectifier { slope } if self.slope.is_none() => self.slope = Some(slope),
            _ => return false,
        }
        true
    }

    fn transposed(&self, flattened: Option<Image>) -> Option<Transposed> {
        flattened.map(|Image { channels, plane }| Transposed { outer: self.shape.outputs, channels, plane })
    }

    fn on_cpu(&self, _: usize, _: ConvPolicy) -> Machine {
        let &Product { shape, weight, slope } = self;
        Machine::Dense(Cpu { outputs: shape.outputs, weight, kernel: dense::cpu::Dense::new(shape, slope) })
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

impl OnCpu<f32> for Cpu {
    fn forward(&mut self, step: Step<'_>, x: &[f32], y: &mut [f32], _: &mut ForwardPass<'_>) -> Result<()> {
        let (weights, bias) = (step.tensor(self.weight), step.tensor(self.weight + 1));
        self.kernel.forward(step.threads, step.scratch, x, weights, bias, y);
        Ok(())
    }

    fn backward(&mut self, mut step: Step<'_>, on: Sides<'_, f32>, pass: BackwardPass<'_>) -> Result<()> {
        let Cpu { outputs, weight, kernel } = self;
        let (Sides { x, y, dy, dx }, BackwardPass { sink, bias, .. }) = (on, pass);
        let from = dense::cpu::Backward { x, weights: step.tensor(*weight), y, dy };
        let db = &mut bias[..*outputs];
        kernel.backward(step.threads, step.scratch, from, sink.gradient(*weight), db, dx);
        step.hand_over(sink, *weight, db)
    }
}
