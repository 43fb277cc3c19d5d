//! From a list of layers to shapes, tensors and slots of memory.
//!
//! Activations live in *slots*, numbered along the network; slot 0 holds the images. A layer either reads one
//! slot and writes the next, or works in place: activation functions and dropout do, since their backward passes
//! need no more than their output (or the mask's key), and the layer before them does not need its own output.

use mgpu::Layout;
use mgpu_kernels::{activation, conv, dense, pool};

use super::spec::{Layer, Spec};

/// Extents of the images in memory. Flattening moves no data: a flattened image is still one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) channels: usize,
    /// Rows times columns.
    pub(super) plane: usize,
}

/// One operation, with everything about its shape but the number of images.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    /// `weight` is the tensor of the weights; the bias is the next one.
    Conv {
        shape: conv::Shape,
        weight: usize,
    },
    /// `weight` as above; `image` is what was flattened into its input.
    Dense {
        shape: dense::Shape,
        weight: usize,
        image: Image,
    },
    /// `weight` scales, the next tensor shifts; `mean` is the running mean among the buffers, the variance the
    /// next one. `index` counts the network's normalisations.
    Norm {
        index: usize,
        plane: usize,
        weight: usize,
        mean: usize,
    },
    Activation {
        slope: f32,
    },
    /// `index` counts the network's pooling layers.
    Pool {
        index: usize,
        shape: pool::Shape,
        channels: usize,
    },
    /// `layer` is the index in the spec, to tell masks apart.
    Dropout {
        probability: f32,
        layer: usize,
        image: Image,
    },
}

impl Op {
    pub(super) fn has_parameters(&self) -> bool {
        matches!(self, Op::Conv { .. } | Op::Dense { .. } | Op::Norm { .. })
    }

    fn in_place(&self) -> bool {
        matches!(self, Op::Activation { .. } | Op::Dropout { .. })
    }
}

impl Image {
    fn of([channels, height, width]: [usize; 3]) -> Self {
        Image { channels, plane: height * width }
    }
}

/// An operation and the slots it works on, the same one if in place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stage {
    pub(super) op: Op,
    pub(super) input: usize,
    pub(super) output: usize,
}

/// How the elements of a parameter tensor start out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Role {
    /// Weights that sum over `fan_in` inputs, with a rectifier behind them or not.
    Weight { fan_in: usize, rectified: bool },
    /// Bias of a convolution or dense layer.
    Bias,
    /// Scale of a normalisation.
    Scale,
    /// Shift of a normalisation.
    Shift,
}

/// A network with all shapes worked out.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) stages: Vec<Stage>,
    /// Elements for one image in each slot.
    pub(super) slots: Vec<usize>,
    /// Output elements for one image of each pooling layer.
    pub(super) pools: Vec<usize>,
    /// Channels of each normalisation.
    pub(super) norms: Vec<usize>,
    pub(super) parameters: Layout,
    /// The role of each parameter tensor.
    pub(super) roles: Vec<Role>,
    pub(super) buffers: Layout,
}

impl Plan {
    /// # Panics
    /// If a dense layer follows an image without a `Flatten` between them, or a kernel does not fit its image.
    pub(super) fn new(spec: &Spec) -> Plan {
        let mut plan = Plan {
            stages: Vec::new(),
            slots: vec![spec.input.iter().product()],
            pools: Vec::new(),
            norms: Vec::new(),
            parameters: Layout::new(),
            roles: Vec::new(),
            buffers: Layout::new(),
        };
        let mut extents = spec.input;
        let mut image = Image::of(extents);
        for (index, layer) in spec.layers.iter().enumerate() {
            let rectified = matches!(spec.layers.get(index + 1), Some(Layer::Relu | Layer::LeakyRelu));
            let (op, after) = plan.resolve(index, *layer, extents, image, rectified);
            extents = after;
            if *layer != Layer::Flatten {
                image = if op.is_some_and(|op| op.in_place()) { image } else { Image::of(extents) };
            }
            let Some(op) = op else { continue };
            let input = plan.slots.len() - 1;
            if !op.in_place() {
                plan.slots.push(extents.iter().product());
            }
            plan.stages.push(Stage { op, input, output: plan.slots.len() - 1 });
        }
        plan
    }

    /// The operation of a layer on images of `extents`, and the extents of what comes out.
    fn resolve(
        &mut self,
        index: usize,
        layer: Layer,
        extents: [usize; 3],
        image: Image,
        rectified: bool,
    ) -> (Option<Op>, [usize; 3]) {
        let [channels, height, width] = extents;
        match layer {
            Layer::Conv { filters, kernel, padding } => {
                let shape = conv::Shape { channels, height, width, filters, kernel, padding };
                let role = Role::Weight { fan_in: shape.filter_len(), rectified };
                let weight = self.add_pair(index, &[filters, channels, kernel, kernel], role, Role::Bias);
                let after = [filters, shape.out_height(), shape.out_width()];
                (Some(Op::Conv { shape, weight }), after)
            }
            Layer::Dense(outputs) => {
                assert_eq!((height, width), (1, 1), "layer {index}: a dense layer needs a flattened input");
                let shape = dense::Shape { inputs: channels, outputs };
                let role = Role::Weight { fan_in: channels, rectified };
                let weight = self.add_pair(index, &[outputs, channels], role, Role::Bias);
                (Some(Op::Dense { shape, weight, image }), [outputs, 1, 1])
            }
            Layer::BatchNorm => {
                let weight = self.add_pair(index, &[channels], Role::Scale, Role::Shift);
                let mean = self.buffers.push(format!("{index}.running_mean"), [channels]);
                self.buffers.push(format!("{index}.running_var"), [channels]);
                self.norms.push(channels);
                let op = Op::Norm { index: self.norms.len() - 1, plane: height * width, weight, mean };
                (Some(op), extents)
            }
            Layer::MaxPool(rounding) => {
                let shape = pool::Shape { height, width, rounding };
                let after = [channels, shape.out_height(), shape.out_width()];
                self.pools.push(after.iter().product());
                (Some(Op::Pool { index: self.pools.len() - 1, shape, channels }), after)
            }
            Layer::Relu => (Some(Op::Activation { slope: 0.0 }), extents),
            Layer::LeakyRelu => (Some(Op::Activation { slope: activation::LEAKY_SLOPE }), extents),
            Layer::Dropout(probability) => (Some(Op::Dropout { probability, layer: index, image }), extents),
            Layer::Flatten => (None, [extents.iter().product(), 1, 1]),
        }
    }

    /// Adds a layer's weight and bias tensors and returns the index of the weight.
    fn add_pair(&mut self, layer: usize, shape: &[usize], weight: Role, bias: Role) -> usize {
        self.roles.extend([weight, bias]);
        let index = self.parameters.push(format!("{layer}.weight"), shape);
        self.parameters.push(format!("{layer}.bias"), [shape[0]]);
        index
    }
}
