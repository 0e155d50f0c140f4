//! The value as kept.
//!
//! ```text
//! codec u8, 1 for JSON · schema length u8, schema · the value, to the end
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    kept::Kept,
    recorded::{NotRecordableError, RecordedResponse},
};
use crate::error::StoreError;

impl RecordedResponse {
    /// A value of work that a [`Guard`](crate::Guard) runs, as if the work had returned
    /// it. `schema` is that of the guard.
    ///
    /// Operators and hooks make one to resolve an unknown outcome.
    ///
    /// ```
    /// use tower_idempotency::store::admin::{RecordedResponse, Resolution};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let found = RecordedResponse::of_value(&("invoice-7", 1200), "invoice/1")?;
    /// assert_eq!(found.status(), None);
    /// let resolution = Resolution::Happened(found);
    /// # let _ = resolution;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A [`NotRecordableError`] if the value cannot be written as JSON, or the schema is
    /// longer than 255 bytes.
    pub fn of_value<T>(value: &T, schema: &str) -> Result<Self, NotRecordableError>
    where
        T: Serialize + ?Sized,
    {
        let Ok(length) = u8::try_from(schema.len()) else {
            return Err(NotRecordableError::SchemaTooLong(schema.len()));
        };
        let mut bytes = vec![JSON, length];
        bytes.extend_from_slice(schema.as_bytes());
        // The application's own code writes the value.
        let written = AssertUnwindSafe(|| serde_json::to_writer(&mut bytes, value));
        match catch_unwind(written) {
            Ok(Ok(())) => Ok(Self::of(Kept::Value(bytes.into()))),
            Ok(Err(_)) | Err(_) => Err(NotRecordableError::ValueNotSerializable),
        }
    }

    /// Returns the value, or `None` for a tombstone. The error quotes nothing of it.
    pub(crate) fn to_value<T: DeserializeOwned>(
        &self,
        schema: &str,
    ) -> Result<Option<T>, StoreError> {
        let Some(value) = self.value() else {
            return match self.status() {
                None => Ok(None),
                Some(_) => Err(StoreError::corrupt("value: the record holds a response")),
            };
        };
        let [codec, length, rest @ ..] = &value[..] else {
            return Err(StoreError::corrupt("value: it ends too early"));
        };
        let Some((of, json)) = rest.split_at_checked(usize::from(*length)) else {
            return Err(StoreError::corrupt("value: it ends too early"));
        };
        if *codec != JSON {
            return Err(StoreError::corrupt("value: its codec is not known here"));
        }
        if of != schema.as_bytes() {
            return Err(StoreError::corrupt("value: its `schema` is another one"));
        }
        let read = AssertUnwindSafe(|| serde_json::from_slice(json));
        match catch_unwind(read) {
            Ok(Ok(value)) => Ok(Some(value)),
            Ok(Err(_)) | Err(_) => Err(StoreError::corrupt("value: it does not fit its type")),
        }
    }
}

const JSON: u8 = 1;

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn recorded() -> RecordedResponse {
        RecordedResponse::of_value(&("paid", 7), "receipt/1").unwrap()
    }

    fn read<T: DeserializeOwned>(bytes: Bytes, schema: &str) -> Result<Option<T>, StoreError> {
        RecordedResponse::decode(bytes)?.to_value(schema)
    }

    #[test]
    fn value_bytes_of_version_1_stay_readable() {
        assert_eq!(recorded().encode(), GOLDEN);
        let value = read::<(String, u8)>(GOLDEN.into(), "receipt/1").unwrap();
        assert_eq!(value, Some(("paid".to_owned(), 7)));
    }

    #[test]
    fn every_cut_of_a_value_is_noticed() {
        let value = recorded().value().unwrap().clone();
        for end in 0..value.len() {
            let cut = RecordedResponse::of(Kept::Value(value.slice(..end))).encode();
            assert!(read::<(String, u8)>(cut, "receipt/1").is_err(), "{end}");
        }
    }

    const GOLDEN: &[u8] = b"ti\x01\x02\x97\xc7|z\x01\x09receipt/1[\"paid\",7]";
}
