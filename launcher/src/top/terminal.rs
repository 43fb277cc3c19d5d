//! The terminal: raw mode, its alternate screen, and ratatui's backend in escape sequences that every terminal knows.

use std::fmt::Write as _;
use std::io::{self, Write};

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The screen; dropping it restores the terminal.
pub(super) struct Screen {
    before: Termios,
    /// What was drawn since the last flush.
    pending: String,
}

impl Screen {
    /// Switches to raw mode and to the alternate screen.
    pub(super) fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        let mut screen = Screen { before, pending: String::new() };
        screen.send("\x1b[?1049h\x1b[?25l\x1b[2J")?;
        Ok(screen)
    }

    fn send(&mut self, text: &str) -> io::Result<()> {
        self.pending += text;
        self.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = self.send("\x1b[0m\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

impl Backend for Screen {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        self.pending += &cells(content);
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        self.send("\x1b[?25l")
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        self.send("\x1b[?25h")
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        // It is hidden, and nothing is drawn relative to it.
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        self.send(&format!("\x1b[{};{}H", u32::from(y) + 1, u32::from(x) + 1))
    }

    fn clear(&mut self) -> io::Result<()> {
        self.clear_region(ClearType::All)
    }

    fn clear_region(&mut self, region: ClearType) -> io::Result<()> {
        self.send(match region {
            ClearType::All => "\x1b[2J",
            ClearType::AfterCursor => "\x1b[J",
            ClearType::BeforeCursor => "\x1b[1J",
            ClearType::CurrentLine => "\x1b[2K",
            ClearType::UntilNewLine => "\x1b[K",
        })
    }

    fn size(&self) -> io::Result<Size> {
        let size = tcgetwinsize(io::stdout())?;
        // Some terminals do not tell their size.
        let or = |value: u16, default| if value == 0 { default } else { value };
        Ok(Size::new(or(size.ws_col, 80), or(size.ws_row, 24)))
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::new(0, 0) })
    }

    fn flush(&mut self) -> io::Result<()> {
        let pending = std::mem::take(&mut self.pending);
        let mut stdout = io::stdout().lock();
        stdout.write_all(pending.as_bytes())?;
        stdout.flush()
    }
}

/// The escape sequences that draw these cells.
fn cells<'a>(content: impl Iterator<Item = (u16, u16, &'a Cell)>) -> String {
    let (mut text, mut next, mut style) = (String::new(), None, None);
    for (x, y, cell) in content {
        if next != Some((x, y)) {
            // Writing to a string cannot fail.
            let _ = write!(text, "\x1b[{};{}H", u32::from(y) + 1, u32::from(x) + 1);
        }
        let wanted = (cell.fg, cell.modifier);
        if style != Some(wanted) {
            text += "\x1b[0";
            for (modifier, code) in
                [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")]
            {
                text += if cell.modifier.contains(modifier) { code } else { "" };
            }
            text += match cell.fg {
                Color::Red => ";31",
                Color::Green => ";32",
                Color::Yellow => ";33",
                Color::Cyan => ";36",
                _ => "",
            };
            text.push('m');
            style = Some(wanted);
        }
        text += cell.symbol();
        // A wide character leaves the cursor further right; the next cell sets it.
        next = (cell.symbol().len() == 1).then(|| (x + 1, y));
    }
    text + "\x1b[0m"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_style_are_drawn_together() {
        let mut bold = Cell::new("b");
        bold.set_fg(Color::Red);
        bold.modifier = Modifier::BOLD;
        let (plain, wide) = (Cell::new("a"), Cell::new("宽"));
        let content = [(0, 0, &plain), (1, 0, &plain), (2, 0, &bold), (5, 1, &wide), (7, 1, &plain)];
        assert_eq!(
            cells(content.into_iter()),
            "\x1b[1;1H\x1b[0maa\x1b[0;1;31mb\x1b[2;6H\x1b[0m宽\x1b[2;8Ha\x1b[0m"
        );
    }
}
