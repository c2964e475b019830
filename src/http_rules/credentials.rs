//! The default list of request headers that mark a response as one user's.

/// Headers that mark a request as one user's: its response is not for others.
///
/// A shared cache may store a response to `Authorization` only if the response allows it (RFC 9111, 3.5); for the
/// other headers no standard exists, so their requests bypass the cache.
pub(crate) const CREDENTIAL_HEADERS: [&str; 41] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "x-auth-token",
    "x-amz-security-token",
    // RFC 9421: a signature identifies the key that made it.
    "signature",
    "signature-input",
    // RFC 9440: the client certificate, as reported by a proxy that terminates TLS.
    "client-cert",
    "client-cert-chain",
    // oauth2-proxy: `--pass-user-headers`, `--pass-access-token`.
    "x-forwarded-user",
    "x-forwarded-email",
    "x-forwarded-preferred-username",
    "x-forwarded-groups",
    "x-forwarded-access-token",
    // oauth2-proxy behind nginx's `auth_request`: `--set-xauthrequest`.
    "x-auth-request-user",
    "x-auth-request-email",
    "x-auth-request-preferred-username",
    "x-auth-request-groups",
    "x-auth-request-access-token",
    // Cloudflare Access.
    "cf-access-jwt-assertion",
    "cf-access-authenticated-user-email",
    // Google's Identity-Aware Proxy.
    "x-goog-iap-jwt-assertion",
    "x-goog-authenticated-user-email",
    "x-goog-authenticated-user-id",
    // AWS Application Load Balancer.
    "x-amzn-oidc-data",
    "x-amzn-oidc-identity",
    "x-amzn-oidc-accesstoken",
    "x-amzn-mtls-clientcert",
    "x-amzn-mtls-clientcert-subject",
    // Azure App Service and Container Apps.
    "x-ms-client-principal",
    "x-ms-client-principal-id",
    "x-ms-client-principal-idp",
    "x-ms-client-principal-name",
    "x-ms-token-aad-access-token",
    "x-ms-token-aad-id-token",
    "x-ms-token-facebook-access-token",
    "x-ms-token-google-access-token",
    "x-ms-token-google-id-token",
    "x-ms-token-twitter-access-token",
    // Envoy.
    "x-forwarded-client-cert",
];
