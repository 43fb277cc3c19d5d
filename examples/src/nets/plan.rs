//! From a list of layers to shapes, tensors, stages and slots of memory.
//!
//! A *stage* is what is computed in one go. A convolution or dense layer takes the activation function behind it along,
//! and a convolution the pooling layer behind that: the convolution's own output is needed for a moment only, and of all
//! such layers the pooled outputs are kept.
//!
//! Activations live in *slots*, numbered along the network; slot 0 holds the images. A stage either reads one slot and
//! writes the next, or works in place: dropout does, and activation functions by themselves, since their backward passes
//! need no more than their output (or the mask's key), and the stage before them needs the sign of its own at most.
//!
//! Images lie with their channels last, \[N, H, W, C\], on the CPU and on GPUs, and a flattened image is still one. A dense
//! layer behind it is what notices: its weights are for \[C, H, W\].

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
    /// `weight` is the tensor of the weights; the bias is the next one. An activation with `slope` and pooling may follow.
    Conv { shape: conv::Shape, weight: usize, slope: Option<f32>, pool: Option<Pool> },
    /// `weight` and `slope` as above.
    Dense { shape: dense::Shape, weight: usize, slope: Option<f32> },
    /// `weight` scales, the next tensor shifts; `mean` is the running mean among the buffers, the variance the
    /// next one. `index` counts the network's normalisations.
    Norm { index: usize, weight: usize, mean: usize },
    /// By itself.
    Activation { slope: f32 },
    /// By itself.
    Pool(Pool),
    /// `layer` is the index in the spec, to tell masks apart.
    Dropout { probability: f32, layer: usize, image: Image },
}

/// A pooling layer. `index` counts those of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) index: usize,
    pub(super) shape: pool::Shape,
    pub(super) channels: usize,
}

impl Op {
    /// The tensor of the weights; that of the bias is the next one.
    pub(super) fn weight(&self) -> Option<usize> {
        match *self {
            Op::Conv { weight, .. } | Op::Dense { weight, .. } | Op::Norm { weight, .. } => Some(weight),
            _ => None,
        }
    }

    /// True if values are replaced where they lie.
    pub(super) fn in_place(&self) -> bool {
        matches!(self, Op::Activation { .. } | Op::Dropout { .. })
    }

    /// True if the gradient of the input takes the place of the output's.
    pub(super) fn backward_in_place(&self) -> bool {
        self.in_place() || matches!(self, Op::Norm { .. })
    }

    /// This operation with `next` behind it, if it can take that along.
    fn along(self, next: Op) -> Option<Op> {
        match (self, next) {
            (Op::Conv { shape, weight, slope: None, pool: None }, Op::Activation { slope }) => {
                Some(Op::Conv { shape, weight, slope: Some(slope), pool: None })
            }
            (Op::Conv { shape, weight, slope, pool: None }, Op::Pool(pool)) => {
                Some(Op::Conv { shape, weight, slope, pool: Some(pool) })
            }
            (Op::Dense { shape, weight, slope: None }, Op::Activation { slope }) => {
                Some(Op::Dense { shape, weight, slope: Some(slope) })
            }
            _ => None,
        }
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
    /// Index in the spec of the first of its layers.
    pub(super) layer: usize,
    pub(super) input: usize,
    pub(super) output: usize,
    /// What was flattened into its input, if that is an image of several channels and several positions: the operation
    /// counts its features as \[C, H, W\], and finds \[H, W, C\].
    pub(super) flattened: Option<Image>,
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
    /// What comes in.
    pub(super) image: Image,
    pub(super) stages: Vec<Stage>,
    /// Elements for one image in each slot.
    pub(super) slots: Vec<usize>,
    /// The first slot of vectors: what the first stage writes that reads flattened images. In those before it lie images.
    pub(super) vectors: usize,
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
    /// If a dense layer follows an image without a `Flatten` between them, a kernel does not fit its image, there is no dense
    /// layer, or the last layer leaves an image.
    pub(super) fn new(spec: &Spec) -> Plan {
        let mut plan = Plan {
            image: Image::of(spec.input),
            stages: Vec::new(),
            slots: vec![spec.input.iter().product()],
            vectors: 0,
            pools: Vec::new(),
            norms: Vec::new(),
            parameters: Layout::new(),
            roles: Vec::new(),
            buffers: Layout::new(),
        };
        let mut extents = spec.input;
        // As it lies in memory.
        let mut image = Image::of(extents);
        for (index, layer) in spec.layers.iter().enumerate() {
            let rectified = matches!(spec.layers.get(index + 1), Some(Layer::Relu | Layer::LeakyRelu));
            let (op, after) = plan.resolve(index, *layer, extents, image, rectified);
            if let Some(op) = op {
                let flattened = (image != Image::of(extents)).then_some(image);
                plan.push(op, index, flattened, after.iter().product());
                image = if op.in_place() { image } else { Image::of(after) };
            }
            extents = after;
        }
        assert!(
            image.channels == 1 || image.plane == 1,
            "a network ends in a number for each class, not in {image:?}"
        );
        let flat = plan
            .stages
            .iter()
            .find(|stage| stage.flattened.is_some() || matches!(stage.op, Op::Dense { .. }));
        plan.vectors = flat.expect("a network has a dense layer").output;
        plan
    }

    /// Adds `op`, with `len` elements of output for one image.
    fn push(&mut self, op: Op, layer: usize, flattened: Option<Image>, len: usize) {
        // To an activation function it is all the same how its inputs are counted.
        let follows = flattened.is_none() || op.in_place();
        if let Some(stage) = self.stages.last_mut().filter(|_| follows)
            && let Some(both) = stage.op.along(op)
        {
            stage.op = both;
            self.slots[stage.output] = len;
            return;
        }
        let input = self.slots.len() - 1;
        if !op.in_place() {
            self.slots.push(len);
        }
        let flattened = flattened.filter(|image| !op.in_place() && image.channels > 1 && image.plane > 1);
        self.stages.push(Stage { op, layer, input, output: self.slots.len() - 1, flattened });
    }

    /// The images that are flattened.
    pub(super) fn flattened(&self) -> Image {
        let stage = self.stages.iter().find(|stage| stage.output == self.vectors);
        let flattened = stage.and_then(|stage| stage.flattened);
        flattened.unwrap_or(Image { channels: self.slots[self.vectors - 1], plane: 1 })
    }

    /// The place of the first stage that has parameters, behind the last one if there is none. Below it nobody asks for
    /// gradients.
    pub(super) fn first_with_parameters(&self) -> usize {
        self.stages.iter().position(|stage| stage.op.weight().is_some()).unwrap_or(self.stages.len())
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
                (Some(Op::Conv { shape, weight, slope: None, pool: None }), after)
            }
            Layer::Dense(outputs) => {
                assert_eq!((height, width), (1, 1), "layer {index}: a dense layer needs a flattened input");
                let shape = dense::Shape { inputs: channels, outputs };
                let role = Role::Weight { fan_in: channels, rectified };
                let weight = self.add_pair(index, &[outputs, channels], role, Role::Bias);
                (Some(Op::Dense { shape, weight, slope: None }), [outputs, 1, 1])
            }
            Layer::BatchNorm => {
                let weight = self.add_pair(index, &[channels], Role::Scale, Role::Shift);
                let mean = self.buffers.push(format!("{index}.running_mean"), [channels]);
                self.buffers.push(format!("{index}.running_var"), [channels]);
                self.norms.push(channels);
                (Some(Op::Norm { index: self.norms.len() - 1, weight, mean }), extents)
            }
            Layer::MaxPool(rounding) => {
                let shape = pool::Shape { height, width, rounding };
                let after = [channels, shape.out_height(), shape.out_width()];
                self.pools.push(after.iter().product());
                (Some(Op::Pool(Pool { index: self.pools.len() - 1, shape, channels })), after)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_take_along_what_follows_them() {
        let plan = Plan::new(&Spec::named("deep").unwrap());
        let kinds: Vec<String> = plan
            .stages
            .iter()
            .map(|stage| match stage.op {
                Op::Conv { slope, pool, .. } => format!("{} conv {slope:?} {}", stage.layer, pool.is_some()),
                Op::Dense { slope, .. } => format!("{} dense {slope:?}", stage.layer),
                Op::Dropout { layer, .. } => format!("{layer} dropout"),
                other => format!("{other:?}"),
            })
            .collect();
        let expected = [
            "0 conv Some(0.0) true",
            "3 conv Some(0.2) true",
            "7 dense Some(0.0)",
            "9 dropout",
            "10 dense None",
        ];
        assert_eq!(kinds, expected);
        assert_eq!(plan.slots, [784, 64 * 14 * 14, 128 * 7 * 7, 1024, 10]);
        assert_eq!(plan.vectors, 3);
        assert_eq!(plan.stages[2].flattened, Some(Image { channels: 128, plane: 49 }));
        assert_eq!(plan.stages[4].flattened, None);
    }

    #[test]
    fn what_does_not_follow_a_convolution_stands_by_itself() {
        let plan = Plan::new(&Spec::named("keras").unwrap());
        assert_eq!(plan.stages.iter().position(|stage| matches!(stage.op, Op::Norm { .. })), Some(2));
        let pooled = &plan.stages[3];
        assert!(matches!(pooled.op, Op::Conv { pool: Some(_), .. }));
        assert_eq!((pooled.input, pooled.output), (3, 4));
    }
}
