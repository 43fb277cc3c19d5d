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

use super::layers::{Image, InPlace, Operation, LayerContext};
use super::spec::Spec;
use super::tensors::Tensors;

/// An operation and the slots it works on, the same one if in place.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) op: Box<dyn Operation>,
    /// Index in the spec of the first of its layers.
    pub(super) layer: usize,
    pub(super) input: usize,
    pub(super) output: usize,
    /// What was flattened into its input, if that is an image of several channels and several positions: the operation
    /// counts its features as \[C, H, W\], and finds \[H, W, C\].
    pub(super) flattened: Option<Image>,
}

impl Stage {
    /// Where it stands, and what it does.
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.layer, self.op.describe())
    }

    /// True if the gradient of the input takes the place of the output's.
    pub(super) fn backward_in_place(&self) -> bool {
        self.op.in_place() != InPlace::Neither
    }
}

/// A network with all shapes worked out.
#[derive(Debug)]
pub(super) struct Plan {
    /// What comes in.
    pub(super) image: Image,
    pub(super) stages: Vec<Stage>,
    /// Elements for one image in each slot.
    pub(super) slots: Vec<usize>,
    /// The first slot of vectors: what the first stage writes that reads flattened images. In those before it lie images.
    pub(super) vectors: usize,
    pub(super) tensors: Tensors,
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
            tensors: Tensors::default(),
        };
        let mut extents = spec.input;
        // As it lies in memory.
        let mut image = Image::of(extents);
        for (layer, kind) in spec.layers.iter().enumerate() {
            let rectified = spec.layers.get(layer + 1).is_some_and(|next| next.rectifies());
            let op = kind.plan(&mut plan.tensors, &LayerContext { layer, extents, image, rectified });
            let after = kind.output(extents);
            if let Some(op) = op {
                let flattened = (image != Image::of(extents)).then_some(image);
                image = if op.in_place() == InPlace::Both { image } else { Image::of(after) };
                plan.push(op, layer, flattened, after.iter().product());
            }
            extents = after;
        }
        assert!(
            image.channels == 1 || image.plane == 1,
            "a network ends in a number for each class, not in {image:?}"
        );
        let flat = plan.stages.iter().find(|stage| stage.flattened.is_some() || stage.op.takes_vectors());
        plan.vectors = flat.expect("a network has a dense layer").output;
        plan
    }

    /// Adds `op`, with `len` elements of output for one image.
    fn push(&mut self, op: Box<dyn Operation>, layer: usize, flattened: Option<Image>, len: usize) {
        let in_place = op.in_place() == InPlace::Both;
        // To an activation function it is all the same how its inputs are counted.
        let follows = flattened.is_none() || in_place;
        if let Some(epilogue) = op.as_epilogue().filter(|_| follows)
            && let Some(stage) = self.stages.last_mut()
            && stage.op.fuse(epilogue)
        {
            self.slots[stage.output] = len;
            return;
        }
        let input = self.slots.len() - 1;
        if !in_place {
            self.slots.push(len);
        }
        let flattened = flattened.filter(|image| !in_place && image.channels > 1 && image.plane > 1);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(plan: &Plan) -> Vec<String> {
        plan.stages.iter().map(Stage::name).collect()
    }

    #[test]
    fn layers_fuse_their_epilogues() {
        let plan = Plan::new(&Spec::named("deep").unwrap());
        let expected = [
            "0 conv 64 5x5 same of 1x28x28, relu, pool",
            "3 conv 128 5x5 same of 64x14x14, leaky relu, pool",
            "7 dense 1024 of 6272, relu",
            "9 dropout 0.5",
            "10 dense 10 of 1024",
        ];
        assert_eq!(described(&plan), expected);
        assert_eq!(plan.slots, [784, 64 * 14 * 14, 128 * 7 * 7, 1024, 10]);
        assert_eq!(plan.vectors, 3);
        assert_eq!(plan.stages[2].flattened, Some(Image { channels: 128, plane: 49 }));
        assert_eq!(plan.stages[4].flattened, None);
    }

    #[test]
    fn unfused_layers_are_separate_stages() {
        let plan = Plan::new(&Spec::named("keras").unwrap());
        let described = described(&plan);
        assert_eq!(described.iter().position(|stage| stage == "4 batch norm"), Some(2));
        assert!(described[3].starts_with("5 conv") && described[3].ends_with("pool"), "{described:?}");
        assert_eq!((plan.stages[3].input, plan.stages[3].output), (3, 4));
    }
}
