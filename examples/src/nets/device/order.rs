//! The memory layout of parameter tensors on a GPU.
//!
//! Checkpoints and the CPU use PyTorch's layout: images and filters channel by channel. On a GPU the channel is the
//! fastest index, in images and therefore in filters, and in the rows of a dense layer that reads a flattened image.
//! Optimizers are element-wise, so only transfers between host and device convert the layout.

use mgpu::Layout;
use mgpu::device::ALIGNMENT;

use super::super::layers::Transposed;
use super::super::plan::Plan;

/// The position of each parameter element on the host and on the GPU.
#[derive(Debug, Clone)]
pub(super) struct ElementOrder {
    host: Layout,
    device: Layout,
    tensors: Vec<Transposed>,
}

impl ElementOrder {
    pub(super) fn of_parameters(plan: &Plan) -> Self {
        let as_it_is = |len| Transposed { outer: 1, channels: 1, plane: len };
        let lens = plan.tensors.parameters.tensors().iter().map(|tensor| tensor.len());
        let mut tensors: Vec<Transposed> = lens.map(as_it_is).collect();
        for stage in &plan.stages {
            if let Some((weight, transposed)) = stage.op.weight().zip(stage.op.transposed(stage.flattened)) {
                tensors[weight] = transposed;
            }
        }
        Self::new(&plan.tensors.parameters, tensors)
    }

    fn new(host: &Layout, tensors: Vec<Transposed>) -> Self {
        let mut device = Layout::new();
        for tensor in host.tensors() {
            device.push_aligned(tensor.name.clone(), tensor.shape.clone(), ALIGNMENT);
        }
        ElementOrder { host: host.clone(), device, tensors }
    }

    /// Names and shapes as on the CPU, offsets as on the GPU.
    pub(super) fn layout(&self) -> &Layout {
        &self.device
    }

    /// Converts an arena to device order.
    pub(super) fn to_device(&self, values: &[f32]) -> Vec<f32> {
        let mut moved = vec![0.0; self.device.len()];
        self.pairs(|host, device| moved[device] = values[host]);
        moved
    }

    /// Converts an arena to host order.
    pub(super) fn to_host(&self, values: &[f32]) -> Vec<f32> {
        let mut moved = vec![0.0; self.host.len()];
        self.pairs(|host, device| moved[host] = values[device]);
        moved
    }

    /// Visits the position of every element on the host and on the device.
    fn pairs(&self, mut visit: impl FnMut(usize, usize)) {
        let begins = self.host.tensors().iter().zip(self.device.tensors());
        for ((host, device), &Transposed { outer, channels, plane }) in begins.zip(&self.tensors) {
            for o in 0..outer {
                for c in 0..channels {
                    for p in 0..plane {
                        let row = o * channels * plane;
                        visit(host.offset + row + c * plane + p, device.offset + row + p * channels + c);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nets::{Spec, names};

    #[test]
    fn every_element_comes_back() {
        for name in names() {
            let plan = Plan::new(&Spec::named(name).unwrap());
            let order = ElementOrder::of_parameters(&plan);
            let values: Vec<f32> = (0..plan.tensors.parameters.len()).map(|i| i as f32).collect();
            let moved = order.to_device(&values);
            assert_eq!(order.to_host(&moved), values, "{name}");
            for tensor in order.layout().tensors() {
                assert!(tensor.offset.is_multiple_of(ALIGNMENT));
            }
        }
    }

    #[test]
    fn filters_have_their_channels_last() {
        let plan = Plan::new(&Spec::named("lenet5").unwrap());
        let order = ElementOrder::of_parameters(&plan);
        let values: Vec<f32> = (0..plan.tensors.parameters.len()).map(|i| i as f32).collect();
        let moved = order.to_device(&values);
        // The second convolution: 16 filters of 6 channels and 5x5. Position 0 of channels 0 and 1 are adjacent.
        let (host, device) = (plan.tensors.parameters.range(2).start, order.layout().range(2).start);
        assert_eq!(moved[device..device + 3], [0, 25, 50].map(|at| values[host + at]));
        // The first dense layer reads 16 channels of 5x5.
        let (host, device) = (plan.tensors.parameters.range(4).start, order.layout().range(4).start);
        assert_eq!(moved[device..device + 3], [0, 25, 50].map(|at| values[host + at]));
    }
}
