//! Two-dimensional convolution, stride 1, square kernels.
//!
//! Contract, for a batch of N images. (The order of indices is that of the definition; in memory the channels of an
//! image come last, see [`cpu`].)
//!
//! | tensor | shape |
//! |---|---|
//! | input `x` | \[N, C, H, W\] |
//! | weights `w` | \[F, C, K, K\] |
//! | bias `b` | \[F\] |
//! | output `y` | \[N, F, H', W'\], H' = H + 2P − K + 1, likewise W' |
//!
//! `y[n,f,i,j] = b[f] + Σ_{c,u,v} w[f,c,u,v] · x[n, c, i+u−P, j+v−P]`, where `x` is zero outside the image: the
//! cross-correlation that deep learning calls convolution (Dumoulin and Visin, "A guide to convolution arithmetic for
//! deep learning", 2016). P is 0 for [`Padding::Valid`] and (K−1)/2 for [`Padding::Same`].
//!
//! The gradients of a loss L with respect to its inputs, given `dy` = ∂L/∂y:
//!
//! - `db[f] = Σ_{n,i,j} dy[n,f,i,j]`
//! - `dw[f,c,u,v] = Σ_{n,i,j} dy[n,f,i,j] · x[n, c, i+u−P, j+v−P]`
//! - `dx[n,c,p,q] = Σ_{f,u,v} w[f,c,u,v] · dy[n, f, p−u+P, q−v+P]`
//!
//! A first layer needs no `dx`.

#[cfg(feature = "cuda")]
pub mod benchmark;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod cudnn;
#[cfg(feature = "cuda")]
pub mod direct;
#[cfg(feature = "cuda")]
pub mod first;
#[cfg(feature = "cuda")]
mod fused;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
mod layer;
#[cfg(feature = "cuda")]
mod library_layer;
#[cfg(feature = "cuda")]
mod partition;
#[cfg(feature = "cuda")]
pub mod plain;
#[cfg(feature = "cuda")]
mod tolerance;
#[cfg(feature = "cuda")]
mod tuning;
#[cfg(feature = "cuda")]
mod workspace;

/// How a convolution treats the border of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Zeros around the image, so that output and input have the same size. Needs an odd kernel.
    Same,
    /// No padding: the output shrinks by K − 1.
    Valid,
}

/// The extents of a convolution, except for the number of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Input channels, C.
    pub channels: usize,
    /// Input rows, H.
    pub height: usize,
    /// Input columns, W.
    pub width: usize,
    /// Output channels, F.
    pub filters: usize,
    /// Rows and columns of the kernel, K.
    pub kernel: usize,
    /// Treatment of the border.
    pub padding: Padding,
}

impl ConvShape {
    /// True for a dense layer: one weight for each pair of channels, of images of one pixel.
    pub fn is_dense(&self) -> bool {
        (self.height, self.width, self.kernel) == (1, 1, 1)
    }

    /// Rows or columns of zeros added on each side, P.
    pub fn pad(&self) -> usize {
        match self.padding {
            Padding::Same => (self.kernel - 1) / 2,
            Padding::Valid => 0,
        }
    }

    /// Output rows, H'.
    pub fn out_height(&self) -> usize {
        self.height + 2 * self.pad() + 1 - self.kernel
    }

    /// Output columns, W'.
    pub fn out_width(&self) -> usize {
        self.width + 2 * self.pad() + 1 - self.kernel
    }

    /// Elements of one input image, C·H·W.
    pub fn input_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// Elements of one output image, F·H'·W'.
    pub fn output_len(&self) -> usize {
        self.filters * self.out_height() * self.out_width()
    }

    /// Weights of one filter, C·K·K.
    pub fn filter_len(&self) -> usize {
        self.channels * self.kernel * self.kernel
    }

    /// All weights, F·C·K·K.
    pub fn weights_len(&self) -> usize {
        self.filters * self.filter_len()
    }

    /// Panics unless the kernel fits the image.
    fn check(&self) {
        assert!(self.kernel > 0, "a convolution needs a kernel");
        assert!(self.padding == Padding::Valid || self.kernel % 2 == 1, "same padding needs an odd kernel");
        let smallest = self.height.min(self.width) + 2 * self.pad();
        assert!(self.kernel <= smallest, "a kernel of {} on an image of {smallest}", self.kernel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "same padding needs an odd kernel")]
    fn an_even_kernel_has_no_same_padding() {
        ConvShape { channels: 1, height: 4, width: 4, filters: 1, kernel: 2, padding: Padding::Same }.check();
    }
}
