#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::media_type(data));
