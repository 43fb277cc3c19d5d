//! Draws strokes as pixels, with a round pen, from distances.
//!
//! Every pixel stores the squared distance to the nearest segment drawn so far. The ink follows from that distance
//! once, at the end: full inside the pen's radius, none outside, and a ramp in between for anti-aliasing. Strokes
//! that cross or touch therefore merge instead of adding up.

use super::glyphs::Point;
use crate::data::{IMAGE_LEN, SIDE};

/// Straight segments between two points of a stroke: more are not visible at 28 pixels.
const PIECES: usize = 4;

/// Neighbouring pixels of a row whose distances are computed at once.
const LANES: usize = 8;

/// An unfinished drawing.
pub(super) struct Canvas {
    /// Squared distance of each pixel's centre to the nearest segment, in pixels; valid only up to `reach`.
    distance2: [f32; IMAGE_LEN],
    /// Maximum distance from a segment at which ink can appear.
    reach: f32,
}

impl Canvas {
    /// An empty canvas for pens that leave ink up to `reach` pixels from their path.
    pub(super) fn new(reach: f32) -> Self {
        Self { distance2: [f32::MAX; IMAGE_LEN], reach }
    }

    /// Draws a smooth curve through the points: Catmull and Rom's cubic ("A class of local interpolating splines",
    /// 1974), whose tangent at a point is half the way from the point before to the point after. At both ends, and
    /// at corners (points given twice), the missing neighbour is the point itself.
    pub(super) fn stroke(&mut self, points: &[Point]) {
        for (i, span) in points.windows(2).enumerate() {
            let (p1, p2) = (span[0], span[1]);
            if p1 == p2 {
                continue;
            }
            let p0 = if i == 0 { p1 } else { points[i - 1] };
            let p3 = *points.get(i + 2).unwrap_or(&p2);
            let mut from = p1;
            for piece in 1..=PIECES {
                let t = piece as f32 / PIECES as f32;
                let to = (cubic(p0.0, p1.0, p2.0, p3.0, t), cubic(p0.1, p1.1, p2.1, p3.1, t));
                self.segment(from, to);
                from = to;
            }
        }
    }

    /// Draws a straight segment. Visits the pixels of its bounding box, enlarged by the pen's reach; and some beside them,
    /// beyond its reach, because it takes [`LANES`] at once.
    fn segment(&mut self, a: Point, b: Point) {
        let (dx, dy) = (b.0 - a.0, b.1 - a.1);
        let length2 = dx * dx + dy * dy;
        let inverse = if length2 > 0.0 { 1.0 / length2 } else { 0.0 };
        let columns = pixels(a.0.min(b.0) - self.reach, a.0.max(b.0) + self.reach);
        for y in pixels(a.1.min(b.1) - self.reach, a.1.max(b.1) + self.reach) {
            let py = y as f32 + 0.5 - a.1;
            let start = columns.start as f32 + 0.5 - a.0;
            for first in columns.clone().step_by(LANES) {
                let first = first.min(SIDE - LANES);
                let offset = first as f32 - columns.start as f32;
                let row: &mut [f32; LANES] =
                    self.distance2[y * SIDE + first..].first_chunk_mut().expect("pixels of a row");
                for (x, distance2) in row.iter_mut().enumerate() {
                    let px = start + (offset + x as f32);
                    // The nearest point of the segment is at a + t·(b − a).
                    let t = ((px * dx + py * dy) * inverse).clamp(0.0, 1.0);
                    let (ex, ey) = (px - t * dx, py - t * dy);
                    let here = ex * ex + ey * ey;
                    *distance2 = if here < *distance2 { here } else { *distance2 };
                }
            }
        }
    }

    /// The ink on each pixel, from 0 to 1: 1 up to `radius − softness / 2` from the path, 0 from
    /// `radius + softness / 2` on, linear in between.
    pub(super) fn ink(&self, radius: f32, softness: f32) -> [f32; IMAGE_LEN] {
        let slope = 1.0 / softness;
        self.distance2.map(|distance2| ((radius - distance2.sqrt()) * slope + 0.5).clamp(0.0, 1.0))
    }
}

/// The pixels inside the image whose centres may lie between two coordinates.
fn pixels(low: f32, high: f32) -> std::ops::Range<usize> {
    // Casts from float saturate, so everything outside the image ends at its edge.
    let end = (high.ceil() as usize).min(SIDE);
    (low as usize).min(end)..end
}

/// One coordinate of the curve from `p1` (t = 0) to `p2` (t = 1) with neighbours `p0` and `p3`.
fn cubic(p0: f32, p1: f32, p2: f32, p3: f32, t: f32) -> f32 {
    let (m1, m2) = ((p2 - p0) * 0.5, (p3 - p1) * 0.5);
    let change = p2 - p1;
    p1 + t * (m1 + t * (3.0 * change - 2.0 * m1 - m2 + t * (m1 + m2 - 2.0 * change)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_horizontal_line_has_ink_along_its_path_and_nowhere_else() {
        let mut canvas = Canvas::new(3.0);
        canvas.stroke(&[(5.0, 10.5), (20.0, 10.5)]);
        let ink = canvas.ink(1.0, 1.0);
        for y in 0..SIDE {
            for x in 7..18 {
                // Pixel centres are whole pixels from the line: full ink on it, half ink at the pen's radius.
                let expected = [1.0, 0.5, 0.0][y.abs_diff(10).min(2)];
                assert_eq!(ink[y * SIDE + x], expected, "pixel {x}, {y}");
            }
            assert_eq!((ink[y * SIDE], ink[y * SIDE + 27]), (0.0, 0.0));
        }
    }

    #[test]
    fn strokes_outside_the_image_leave_no_ink_and_do_not_panic() {
        let mut canvas = Canvas::new(2.0);
        canvas.stroke(&[(-50.0, -50.0), (-9.0, 300.0), (400.0, 31.0), (31.0, -1e9)]);
        canvas.stroke(&[(40.0, 40.0), (40.0, 40.0)]);
        canvas.stroke(&[]);
        assert!(canvas.ink(1.0, 1.0).iter().all(|ink| (0.0..=1.0).contains(ink)));
    }

    #[test]
    fn the_curve_passes_through_its_points() {
        assert_eq!(cubic(3.0, 5.0, 8.0, 2.0, 0.0), 5.0);
        assert_eq!(cubic(3.0, 5.0, 8.0, 2.0, 1.0), 8.0);
    }
}
