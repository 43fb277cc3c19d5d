//! The prefix of a rank's lines.

/// Colours of the prefixes in the 256-colour palette: legible on black and on white, and none is red, which suggests an
/// error.
const COLORS: [u8; 6] = [30, 133, 136, 33, 64, 99];

/// `[7] `, with the name padded to `width`. The colour is that of the `index`-th rank.
pub(super) fn prefix(name: &str, index: u32, width: usize, color: bool) -> Vec<u8> {
    let text = format!("[{name:>width$}]");
    if !color {
        return format!("{text} ").into_bytes();
    }
    let color = COLORS[index as usize % COLORS.len()];
    format!("\x1b[38;5;{color}m{text}\x1b[0m ").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Red, green and blue of a colour of the palette's cube, from 0 to 1.
    fn channels(color: u8) -> [f64; 3] {
        let levels = [0.0, 95.0, 135.0, 175.0, 215.0, 255.0];
        let index = usize::from(color - 16);
        [index / 36, index / 6 % 6, index % 6].map(|level| levels[level] / 255.0)
    }

    /// Relative luminance (WCAG 2).
    fn luminance(channels: [f64; 3]) -> f64 {
        let linear = channels.map(|value| ((value + 0.055) / 1.055f64).powf(2.4));
        0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    }

    #[test]
    fn colours_are_legible_and_none_is_red() {
        for color in COLORS {
            let [red, green, blue] = channels(color);
            assert!(red <= 1.5 * f64::max(green, blue), "{color} is red");
            let luminance = luminance([red, green, blue]);
            let (on_black, on_white) = ((luminance + 0.05) / 0.05, 1.05 / (luminance + 0.05));
            // The contrast that WCAG requires for large text and graphics.
            assert!(on_black >= 3.0 && on_white >= 3.0, "{color}: {on_black:.1}, {on_white:.1}");
        }
    }
}
