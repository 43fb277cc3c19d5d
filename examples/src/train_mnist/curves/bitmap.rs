//! A drawing surface of pixels, written as PNG.
//!
//! `plotters` reduces every shape to pixels by itself. Only text needs more: its fonts are those of the system, which a
//! container may lack, so characters come from a rasterised font that is part of this program.

use std::convert::Infallible;
use std::error::Error;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendTextStyle, DrawingBackend, DrawingErrorKind, FontTransform,
};

/// Height of a line of text in pixels: the only size of the font.
const TEXT_HEIGHT: RasterHeight = RasterHeight::Size16;
const WEIGHT: FontWeight = FontWeight::Regular;

/// Three bytes for each pixel, row by row.
#[derive(Debug)]
pub(super) struct Bitmap<'a> {
    size: (u32, u32),
    pixels: &'a mut [u8],
}

/// The bytes of a PNG file with what `draw` has drawn on white.
pub(super) fn png_of(
    size: (u32, u32),
    draw: impl FnOnce(Bitmap<'_>) -> Result<(), Box<dyn Error>>,
) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut pixels = vec![u8::MAX; 3 * size.0 as usize * size.1 as usize];
    draw(Bitmap { size, pixels: &mut pixels })?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    writer.finish()?;
    Ok(bytes)
}

impl Bitmap<'_> {
    /// Mixes a colour into a pixel. Pixels outside are left out.
    fn blend(&mut self, (x, y): BackendCoord, (red, green, blue): (u8, u8, u8), opacity: f64) {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else { return };
        if x >= self.size.0 || y >= self.size.1 {
            return;
        }
        let at = 3 * (y as usize * self.size.0 as usize + x as usize);
        for (old, new) in self.pixels[at..at + 3].iter_mut().zip([red, green, blue]) {
            let mixed = f64::from(*old) * (1.0 - opacity) + f64::from(new) * opacity;
            *old = mixed.round() as u8;
        }
    }
}

/// Width and height of a text in pixels, before it is rotated.
fn extent(text: &str) -> (i32, i32) {
    (get_raster_width(WEIGHT, TEXT_HEIGHT) as i32 * text.chars().count() as i32, TEXT_HEIGHT.val() as i32)
}

impl DrawingBackend for Bitmap<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn present(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn draw_pixel(
        &mut self,
        point: BackendCoord,
        color: BackendColor,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        self.blend(point, color.rgb, color.alpha);
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        _style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let (width, height) = extent(text);
        Ok((width as u32, height as u32))
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        (x, y): BackendCoord,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        let ((width, height), anchor) = (extent(text), style.anchor());
        let left = match anchor.h_pos {
            HPos::Left => 0,
            HPos::Center => -width / 2,
            HPos::Right => -width,
        };
        let top = match anchor.v_pos {
            VPos::Top => 0,
            VPos::Center => -height / 2,
            VPos::Bottom => -height,
        };
        let color = style.color();
        let advance = get_raster_width(WEIGHT, TEXT_HEIGHT) as i32;
        for (character, index) in text.chars().zip(0..) {
            let raster = get_raster(character, WEIGHT, TEXT_HEIGHT);
            let Some(raster) = raster.or_else(|| get_raster('?', WEIGHT, TEXT_HEIGHT)) else { continue };
            for (line, row) in raster.rows().zip(0..) {
                for (intensity, column) in line.iter().zip(0..) {
                    let (across, down) = (left + index * advance + column, top + row);
                    let point = match style.transform() {
                        FontTransform::None => (x + across, y + down),
                        FontTransform::Rotate90 => (x - down, y + across),
                        FontTransform::Rotate180 => (x - across, y - down),
                        FontTransform::Rotate270 => (x + down, y - across),
                    };
                    self.blend(point, color.rgb, color.alpha * f64::from(*intensity) / 255.0);
                }
            }
        }
        Ok(())
    }
}
